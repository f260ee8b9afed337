#include "core/ngram_writer.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "support/check.h"

namespace dart {
namespace {

template <typename T>
T* at(std::span<std::byte> file, uint64_t offset) {
  return reinterpret_cast<T*>(file.data() + offset);
}

// From the last of `size` words to where the next array begins.
void pad_words(std::span<std::byte> file, uint64_t begin, uint64_t size, uint64_t end) {
  std::fill(at<int32_t>(file, begin) + size, at<int32_t>(file, end), kPaddingWord);
}

uint32_t checksum(std::span<const std::byte> file, uint64_t begin, uint64_t end) {
  return crc32(file.subspan(begin, end - begin));
}

}  // namespace

NgramLevels::NgramLevels(int order, const std::string& folder) : order_(order) {
  DART_CHECK(order >= kMinOrder && order <= kMaxOrder, "order ", order, " is outside ", kMinOrder,
             "..", kMaxOrder);
  for (int l = 1; l <= order; ++l) words_.emplace_back(folder);
  for (int l = 1; l < order; ++l) info_.emplace_back(folder);
}

void NgramLevels::set_token_bound(uint64_t bound) {
  DART_CHECK(bound <= uint64_t{1} << 31, "a vocabulary of ", bound, " exceeds 2^31 tokens");
  count_bits_ = count_bits_for(bound);
}

void NgramLevels::resize(int level, uint64_t size) {
  DART_CHECK(size <= kMaxLevelSize, "level ", level, " would have ", size, " nodes, the limit is ",
             kMaxLevelSize, "; prune, or use fewer texts");
  words_[level - 1].resize(size);
  if (level < order_) info_[level - 1].resize(size);
}

void NgramLevels::push_back(int level, int32_t token) {
  const uint64_t node = words_[level - 1].size();
  DART_CHECK(node < kMaxLevelSize, "level ", level, " would exceed the limit of ", kMaxLevelSize,
             " nodes; prune, or use fewer texts");
  words_[level - 1].push_back(0);
  if (level < order_) info_[level - 1].push_back({});
  set_token(level, node, token);
}

void NgramLevels::set_token(int level, uint64_t node, int32_t token) {
  words_[level - 1][node] = level == order_ ? token << count_bits_ : token;
}

void NgramLevels::set_count(int level, uint64_t node, uint32_t count) {
  if (level < order_) {
    info_[level - 1][node].count = count;
    return;
  }
  const uint32_t mask = (1u << count_bits_) - 1;
  words_[level - 1][node] |= static_cast<int32_t>(std::min(count, mask));
  if (count >= mask) large_.push_back({static_cast<uint32_t>(node), count});
}

void NgramLevels::sort_large() {
  std::sort(large_.begin(), large_.end(),
            [](const LargeCount& a, const LargeCount& b) { return a.node < b.node; });
}

void NgramLevels::repair_counts() {
  sort_large();
  const uint32_t mask = (1u << count_bits_) - 1;
  for (int l = order_ - 1; l >= 1; --l) {
    size_t large = 0;
    for (uint64_t node = 0; node < size(l); ++node) {
      const uint64_t begin = info(l, node).first_child;
      const uint64_t end = node + 1 < size(l) ? info(l, node + 1).first_child : size(l + 1);
      uint64_t sum = 0;
      for (uint64_t child = begin; child < end; ++child) {
        uint32_t count;
        if (l + 1 < order_) {
          count = info(l + 1, child).count;
        } else {
          count = static_cast<uint32_t>(words_[l][child]) & mask;
          if (count == mask) count = large_[large++].count;
        }
        sum += count;
      }
      // A node that others follow was seen, even if they count 0.
      if (begin < end) sum = std::max<uint64_t>(sum, 1);
      DART_CHECK(sum <= std::numeric_limits<uint32_t>::max(), "the children of a node count ", sum,
                 " together, the limit is 4294967295");
      info(l, node).count = std::max(info(l, node).count, static_cast<uint32_t>(sum));
    }
  }
}

NgramHeader NgramLevels::finish() {
  sort_large();
  NgramHeader header{};
  header.magic = kNgramMagic;
  header.version = kNgramVersion;
  header.order = static_cast<uint32_t>(order_);
  header.total = total;
  header.vocab_size = vocabulary.size;
  header.count_bits = static_cast<uint32_t>(count_bits_);
  for (int l = 1; l <= order_; ++l) header.level_size[l - 1] = static_cast<uint32_t>(size(l));
  header.tokenizer_sha256 = vocabulary.sha256;
  header.large_counts = static_cast<uint32_t>(large_.size());
  header.metadata_bytes = static_cast<uint32_t>(metadata.size());
  header.file_bytes = layout_of(header).file_bytes;
  return header;
}

void NgramLevels::fill(const NgramHeader& unsealed, std::span<std::byte> file) const {
  NgramHeader header = unsealed;
  const NgramLayout layout = layout_of(header);
  std::memcpy(file.data() + layout.metadata, metadata.data(), metadata.size());
  header.metadata_crc = checksum(file, layout.metadata, layout.metadata + metadata.size());
  for (int d = 0; d < order_; ++d) {
    const LevelLayout& to = layout.level[d];
    const bool deepest = d + 1 == order_;
    const auto words = words_[d].view();
    std::copy(words.begin(), words.end(), at<int32_t>(file, to.words));
    const uint64_t first_index = to.indexes > 0 ? to.index[0] : to.end;
    pad_words(file, to.words, words.size(), deepest ? first_index : to.info);
    if (!deepest) {
      const auto info = info_[d].view();
      auto* infos = at<NodeInfo>(file, to.info);
      std::copy(info.begin(), info.end(), infos);
      infos[info.size()] = {0, static_cast<uint32_t>(words_[d + 1].size())};
    }
    const int32_t* below = at<int32_t>(file, to.words);
    for (int h = 0; h < to.indexes; ++h) {
      auto* index = at<int32_t>(file, to.index[h]);
      for (uint32_t i = 0; i < to.index_size[h]; ++i) index[i] = below[uint64_t{i} * kFanout];
      pad_words(file, to.index[h], to.index_size[h], h + 1 < to.indexes ? to.index[h + 1] : to.end);
      below = index;
    }
    header.level_crc[d] = checksum(file, to.begin, to.end);
  }
  std::copy(large_.begin(), large_.end(), at<LargeCount>(file, layout.large));
  header.large_crc = checksum(file, layout.large, layout.file_bytes);
  std::memcpy(file.data(), &header, sizeof(header));
  header.header_crc = checksum(file, 0, offsetof(NgramHeader, header_crc));
  std::memcpy(file.data(), &header, sizeof(header));
}

uint64_t NgramLevels::write(const std::string& path) {
  const NgramHeader header = finish();
  OutputFile file(path, header.file_bytes);
  fill(header, file.bytes());
  file.commit();
  return header.file_bytes;
}

Mapping NgramLevels::to_memory() {
  const NgramHeader header = finish();
  Mapping memory = map_memory(header.file_bytes);
  fill(header, {memory.data(), memory.size()});
  return memory;
}

NgramBuilder::NgramBuilder(int order, Vocabulary vocabulary, const std::string& folder)
    : levels_(order, folder) {
  DART_CHECK(vocabulary.size > 0, "a model is built for a vocabulary of at least 1 token, got 0");
  levels_.set_token_bound(vocabulary.size);
  levels_.vocabulary = vocabulary;
}

void NgramBuilder::open_node(int level, int32_t token) {
  DART_CHECK(token >= 0 && static_cast<uint32_t>(token) < levels_.vocabulary.size, "token ", token,
             " is outside the vocabulary of ", levels_.vocabulary.size);
  levels_.push_back(level, token);
  if (level < levels_.order()) {
    levels_.info(level, levels_.size(level) - 1).first_child =
        static_cast<uint32_t>(levels_.size(level + 1));
  }
  path_[level - 1] = token;
  sum_[level - 1] = 0;
}

void NgramBuilder::close_from(int level) {
  for (int l = level; l <= open_; ++l) {
    const uint64_t sum = sum_[l - 1];
    DART_CHECK(sum <= std::numeric_limits<uint32_t>::max(), "an n-gram of ", l, " tokens occurs ",
               sum, " times, the limit is 4294967295; use fewer texts");
    levels_.set_count(l, levels_.size(l) - 1, static_cast<uint32_t>(sum));
  }
}

void NgramBuilder::append(std::span<const int32_t> gram, std::span<const int64_t> count) {
  const auto order = static_cast<size_t>(levels_.order());
  DART_CHECK(gram.size() == count.size() * order, "expected ", count.size(), " rows of ", order,
             " tokens, got ", gram.size(), " tokens");
  for (size_t row = 0; row < count.size(); ++row) {
    const auto tokens = gram.subspan(row * order, order);
    int length = 0;
    while (length < levels_.order() && tokens[length] >= 0) ++length;
    int shared = 0;
    while (shared < std::min(open_, length) && tokens[shared] == path_[shared]) ++shared;
    const bool ascends = shared < length && (shared == open_ || tokens[shared] > path_[shared]);
    DART_CHECK(ascends, "n-grams must ascend strictly, row ", row, " does not");
    DART_CHECK(count[row] > 0, "counts must be positive, got ", count[row]);
    close_from(shared + 1);
    for (int l = shared + 1; l <= length; ++l) open_node(l, tokens[l - 1]);
    open_ = length;
    for (int l = 1; l <= length; ++l) sum_[l - 1] += static_cast<uint64_t>(count[row]);
    levels_.total += static_cast<uint64_t>(count[row]);
  }
}

NgramLevels& NgramBuilder::finish() {
  close_from(1);
  open_ = 0;
  return levels_;
}

}  // namespace dart
