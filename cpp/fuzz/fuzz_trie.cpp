// The .trie reader: any bytes are refused, or become a model in which nothing is wrong.
#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "core/trie.h"
#include "fuzz/use_model.h"

namespace {

// An even first byte lets the reader pass the check of the size, so that it sees the nodes.
std::vector<uint8_t> input(const uint8_t* data, size_t size) {
  std::vector<uint8_t> bytes(data + 1, data + size);
  if (data[0] % 2 != 0 || bytes.size() < 40) return bytes;
  const uint64_t nodes = (bytes.size() - 4) / 36;
  bytes.resize(36 * nodes + 4);
  std::memcpy(bytes.data() + 8, &nodes, sizeof(nodes));
  return bytes;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::vector<uint8_t> bytes = input(data, size);
  const dart::Mapping file = dart::guarded_copy(bytes);
  try {
    dart::TrieOptions options;
    options.repair_counts = (data[0] & 2) != 0;
    dart::NgramLevels levels = dart::read_trie(file, "input", options);
    const dart::NgramModel model = dart::NgramModel::from_bytes(levels.to_memory(), "input");
    // A fault in what was accepted ends the process: runtime_error is not caught.
    model.verify();
    dart::look_up(model, data[0], true);
  } catch (const std::invalid_argument&) {
  }
  dart::lift_guard(file.data(), file.size());
  return 0;
}
