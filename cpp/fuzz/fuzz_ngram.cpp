// The reader of compact files: any bytes are refused, or can be looked up without a crash.
#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "core/ngram_format.h"
#include "fuzz/use_model.h"

namespace {

constexpr uint64_t kLongest = 1 << 16;

// An even first byte mends what the header says of sizes and checksum, so that the rest is read.
std::vector<uint8_t> input(const uint8_t* data, size_t size) {
  std::vector<uint8_t> bytes(data + 1, data + size);
  if (data[0] % 2 != 0 || bytes.size() < sizeof(dart::NgramHeader)) return bytes;
  dart::NgramHeader header;
  std::memcpy(&header, bytes.data(), sizeof(header));
  header.magic = dart::kNgramMagic;
  header.version = dart::kNgramVersion;
  header.order = dart::kMinOrder + header.order % (dart::kMaxOrder - dart::kMinOrder + 1);
  header.file_bytes = dart::layout_of(header).file_bytes;
  if (header.file_bytes > kLongest) return bytes;
  header.count_bits %= 32;
  std::memcpy(bytes.data(), &header, sizeof(header));
  header.header_crc =
      dart::crc32(std::as_bytes(std::span(bytes)).first(offsetof(dart::NgramHeader, header_crc)));
  std::memcpy(bytes.data(), &header, sizeof(header));
  bytes.resize(header.file_bytes);
  return bytes;
}

bool is_sound(const dart::NgramModel& model) {
  try {
    model.verify();
    return true;
  } catch (const std::runtime_error&) {
    return false;
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::vector<uint8_t> bytes = input(data, size);
  // Others are for the reader of .trie files.
  if (!dart::is_ngram_file(std::as_bytes(std::span(bytes)))) return 0;
  dart::Mapping file = dart::guarded_copy(bytes);
  const std::byte* address = file.data();
  try {
    const dart::NgramModel model = dart::NgramModel::from_bytes(std::move(file), "input");
    try {
      dart::look_up(model, data[0], false);
    } catch (const std::runtime_error&) {
    }
    // After a clean verification nothing may be found damaged, so errors are not caught.
    if (is_sound(model)) dart::look_up(model, data[0], true);
  } catch (const std::invalid_argument&) {
  }
  dart::lift_guard(address, bytes.size());
  return 0;
}
