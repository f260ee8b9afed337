#include <algorithm>

#include "core/ngram_model.h"
#include "support/check.h"

namespace dart {

void NgramModel::verify() const {
  const NgramLayout layout = layout_of(header_);
  verify_checksums(layout);
  verify_large_counts();
  for (int level = 1; level <= order(); ++level) {
    verify_level(level);
    verify_index(level);
  }
}

void NgramModel::verify_checksums(const NgramLayout& layout) const {
  const auto differs = [&](uint64_t begin, uint64_t end, uint32_t expected) {
    return crc32({bytes_.data() + begin, end - begin}) != expected;
  };
  if (differs(layout.metadata, layout.metadata + header_.metadata_bytes, header_.metadata_crc)) {
    fail<std::runtime_error>(name_, ": the checksum of the metadata does not match");
  }
  for (int d = 0; d < order(); ++d) {
    if (differs(layout.level[d].begin, layout.level[d].end, header_.level_crc[d])) {
      fail<std::runtime_error>(name_, ": the checksum of level ", d + 1, " does not match");
    }
  }
  if (differs(layout.large, layout.file_bytes, header_.large_crc)) {
    fail<std::runtime_error>(name_, ": the checksum of the large counts does not match");
  }
}

void NgramModel::verify_large_counts() const {
  const auto out_of_order = [](const LargeCount& a, const LargeCount& b) {
    return a.node >= b.node;
  };
  const Level& deepest = level_[order() - 1];
  if (std::adjacent_find(large_.begin(), large_.end(), out_of_order) != large_.end() ||
      (!large_.empty() && large_.back().node >= deepest.size)) {
    fail<std::runtime_error>(name_, ": the large counts are not in order");
  }
}

void NgramModel::verify_level(int level) const {
  if (level == 1) {
    verify_children(0, 0, {0, level_size(1)});
    return;
  }
  // The ranges of children tile the level, so every node of it is checked once.
  uint32_t expected = 0;
  for (uint32_t node = 0; node < level_size(level - 1); ++node) {
    const auto range = children(level - 1, node);
    if (range.first != expected) damaged("the ranges of children do not join up");
    expected = range.second;
    verify_children(level - 1, node, range);
  }
  if (expected != level_size(level)) damaged("nodes have no parent");
}

void NgramModel::verify_children(int level, uint32_t node,
                                 std::pair<uint32_t, uint32_t> range) const {
  const uint64_t limit = level == 0 ? header_.total : count(level, node);
  if (range.first < range.second && limit == 0) damaged("a node with children has the count 0");
  int32_t before = -1;
  for (uint32_t child = range.first; child < range.second; ++child) {
    const int32_t at = token(level + 1, child);
    if (at <= before) damaged("tokens do not ascend");
    if (header_.vocab_size != 0 && static_cast<uint32_t>(at) >= header_.vocab_size) {
      damaged("a token is outside the vocabulary");
    }
    if (count(level + 1, child) > limit) damaged("a node counts more than its parent");
    before = at;
  }
}

void NgramModel::verify_index(int level) const {
  const Level& at = level_[level - 1];
  const int32_t* below = at.word;
  uint64_t size = at.size;
  for (int h = 0; h < at.indexes; ++h) {
    size = (size + kFanout - 1) / kFanout;
    for (uint64_t i = 0; i < size; ++i) {
      if (at.index[h][i] != below[i * kFanout]) damaged("the search index is wrong");
    }
    below = at.index[h];
  }
}

}  // namespace dart
