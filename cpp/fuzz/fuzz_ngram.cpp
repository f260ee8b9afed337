// The reader of compact files: any bytes are refused, or can be looked up without a crash.
#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "core/ngram_format.h"
#include "fuzz/use_model.h"

namespace {

constexpr uint64_t kLongest = 1 << 16;

std::span<const std::byte> part(const std::vector<uint8_t>& bytes, uint64_t begin, uint64_t end) {
  return std::as_bytes(std::span(bytes)).subspan(begin, end - begin);
}

// Makes the checksums those of the bytes.
void seal(const dart::NgramLayout& layout, const std::vector<uint8_t>& bytes,
          dart::NgramHeader& header) {
  header.metadata_crc =
      dart::crc32(part(bytes, layout.metadata, layout.metadata + header.metadata_bytes));
  for (uint32_t d = 0; d < header.order; ++d) {
    header.level_crc[d] = dart::crc32(part(bytes, layout.level[d].begin, layout.level[d].end));
  }
  header.large_crc = dart::crc32(part(bytes, layout.large, layout.file_bytes));
}

// Bit 0 of the first byte clear: what the header says of sizes and its own checksum is mended, so
// that the rest is read. Bit 1 clear too: all checksums are, so that verification reads on.
std::vector<uint8_t> input(const uint8_t* data, size_t size) {
  std::vector<uint8_t> bytes(data + 1, data + size);
  if (data[0] % 2 != 0 || bytes.size() < sizeof(dart::NgramHeader)) return bytes;
  dart::NgramHeader header;
  std::memcpy(&header, bytes.data(), sizeof(header));
  header.magic = dart::kNgramMagic;
  header.version = dart::kNgramVersion;
  header.order = dart::kMinOrder + header.order % (dart::kMaxOrder - dart::kMinOrder + 1);
  std::fill(header.level_size.begin() + header.order, header.level_size.end(), 0);
  const dart::NgramLayout layout = dart::layout_of(header);
  header.file_bytes = layout.file_bytes;
  if (header.file_bytes > kLongest) return bytes;
  header.count_bits %= 32;
  bytes.resize(header.file_bytes);
  if ((data[0] & 2) == 0) seal(layout, bytes, header);
  std::memcpy(bytes.data(), &header, sizeof(header));
  header.header_crc = dart::crc32(part(bytes, 0, offsetof(dart::NgramHeader, header_crc)));
  std::memcpy(bytes.data(), &header, sizeof(header));
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
