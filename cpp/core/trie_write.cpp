#include <algorithm>
#include <cstring>
#include <limits>

#include "core/ngram_model.h"
#include "core/trie.h"
#include "support/check.h"

namespace dart {
namespace {

constexpr uint64_t kProgressStep = uint64_t{1} << 22;

class Writer {
 public:
  explicit Writer(std::byte* to) : to_(to) {}

  template <typename T>
  void put(T value) {
    std::memcpy(to_, &value, sizeof(T));
    to_ += sizeof(T);
  }

 private:
  std::byte* to_;
};

int32_t trie_count(uint32_t count) {
  constexpr uint32_t kHighest = std::numeric_limits<int32_t>::max();
  DART_CHECK(count <= kHighest, "the count ", count, " exceeds ", kHighest,
             ", the highest that a .trie holds; keep the compact file");
  return static_cast<int32_t>(count);
}

}  // namespace

void write_trie(const NgramModel& model, const std::string& to, const Progress& progress) {
  // The size of the file and the ids in it follow from ranges that must join up.
  model.verify();
  const uint64_t nodes = model.node_count();
  OutputFile file(to, 16 + 24 * nodes + 12 * (nodes - 1));
  Writer out(file.bytes().data());
  out.put<uint64_t>(model.order());
  out.put<uint64_t>(nodes);
  uint64_t done = 0;
  const auto record = [&](int level, int32_t token, uint64_t parent, int32_t count,
                          std::pair<uint64_t, uint64_t> children, uint64_t first_id) {
    out.put(token);
    out.put(parent);
    out.put(count);
    out.put<uint64_t>(children.second - children.first);
    for (uint64_t child = children.first; child < children.second; ++child) {
      out.put(model.token(level + 1, static_cast<uint32_t>(child)));
      out.put<uint64_t>(first_id + child);
    }
    if (++done % kProgressStep == 0 && progress) progress(done, nodes);
  };
  // The reference counts the root in 32 bits too, and never reads it.
  const auto total = std::min<uint64_t>(model.header().total, std::numeric_limits<int32_t>::max());
  record(0, 0, 0, static_cast<int32_t>(total), {0, model.level_size(1)}, 1);
  // Ids of level l are [first, first + size), in the level's own order.
  uint64_t first = 1;
  uint64_t first_above = 0;
  for (int level = 1; level <= model.order(); ++level) {
    const uint64_t size = model.level_size(level);
    uint32_t parent = 0;
    for (uint32_t node = 0; node < size; ++node) {
      while (level > 1 && model.children(level - 1, parent).second <= node) ++parent;
      record(level, model.token(level, node), level == 1 ? 0 : first_above + parent,
             trie_count(model.count(level, node)), model.children(level, node), first + size);
    }
    first_above = first;
    first += size;
  }
  file.commit();
}

}  // namespace dart
