#include "core/pack.h"

#include <algorithm>

#include "support/check.h"

namespace dart {
namespace {

void write_links(std::span<const int32_t> parent, std::span<int64_t> first_child,
                 std::span<int64_t> next_sibling) {
  std::ranges::fill(first_child, -1);
  std::ranges::fill(next_sibling, -1);
  // Backwards, so that each child goes in front of its later siblings.
  for (size_t node = parent.size(); node-- > 1;) {
    if (parent[node] < 0) continue;
    next_sibling[node] = first_child[parent[node]];
    first_child[parent[node]] = static_cast<int64_t>(node);
  }
}

// Row i is the row of its parent and one more node.
template <typename Word, typename Mark>
void write_rows(std::span<const int32_t> parent, size_t row_size, Word* rows, Mark mark) {
  for (size_t node = 0; node < parent.size(); ++node) {
    Word* row = rows + node * row_size;
    if (parent[node] < 0) {
      std::fill_n(row, row_size, Word{0});
    } else {
      std::copy_n(rows + parent[node] * row_size, row_size, row);
    }
    mark(row, node);
  }
}

}  // namespace

void pack(std::span<const int32_t> parent, std::span<const int32_t> depth, int64_t length,
          const PackedSpan& packed) {
  const size_t width = parent.size();
  for (size_t node = 0; node < width; ++node) {
    DART_CHECK(parent[node] >= -1 && parent[node] < static_cast<int64_t>(node), "node ", node,
               " has parent ", parent[node], "; expected -1 or an earlier node");
  }
  if (!packed.position.empty()) {
    std::ranges::transform(depth, packed.position.begin(),
                           [length](int32_t level) { return length + level; });
  }
  if (!packed.first_child.empty()) write_links(parent, packed.first_child, packed.next_sibling);
  if (!packed.mask.empty()) {
    write_rows(parent, width, packed.mask.data(), [](uint8_t* row, size_t node) { row[node] = 1; });
  }
  if (!packed.mask_bits.empty()) {
    write_rows(parent, mask_words(static_cast<int>(width)), packed.mask_bits.data(),
               [](uint64_t* row, size_t node) { row[node / 64] |= uint64_t{1} << node % 64; });
  }
}

}  // namespace dart
