#include "core/ngram_model.h"

#include <algorithm>
#include <bit>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "core/trie.h"
#include "support/check.h"

namespace dart {
namespace {

// How many of words[0, n), n <= 16, are <= key. Words ascend, so they are a prefix.
// Reads 16 words whatever n is.
inline uint32_t count_up_to(const int32_t* words, uint32_t n, int32_t key) {
#if defined(__SSE2__)
  const __m128i wanted = _mm_set1_epi32(key);
  const auto* lines = reinterpret_cast<const __m128i*>(words);
  const auto above = [&](int i) { return _mm_cmpgt_epi32(_mm_loadu_si128(lines + i), wanted); };
  const __m128i low = _mm_packs_epi32(above(0), above(1));
  const __m128i high = _mm_packs_epi32(above(2), above(3));
  const auto mask = static_cast<uint32_t>(_mm_movemask_epi8(_mm_packs_epi16(low, high)));
  // The first word above the key, or n if there is none before it.
  return static_cast<uint32_t>(std::countr_zero(mask | (1u << n)));
#else
  uint32_t found = 0;
  for (uint32_t i = 0; i < kFanout; ++i) found += (words[i] <= key) & (i < n);
  return found;
#endif
}

}  // namespace

// The children of one node, seen at every stride of the search index that a search will use.
struct NgramModel::Range {
  Range(const Level& in, uint32_t first, uint32_t last) : level(&in) {
    begin[0] = first;
    end[0] = last;
    const auto up = [](uint32_t i) { return i / kFanout + (i % kFanout != 0 ? 1 : 0); };
    while (end[top] - begin[top] > kFanout && top < level->indexes) {
      begin[top + 1] = up(begin[top]);
      end[top + 1] = up(end[top]);
      ++top;
    }
  }

  const Level* level;
  int top = 0;
  // Entries [begin[h], end[h]) of stride 16^h lie inside the range.
  std::array<uint32_t, kMaxIndexes + 1> begin;
  std::array<uint32_t, kMaxIndexes + 1> end;
};

// Where a token's word can stand, at one stride.
struct NgramModel::Probe {
  int32_t token;
  int32_t key;
  uint32_t begin;
  uint32_t end;
};

NgramModel NgramModel::open(const std::string& path) { return from_bytes(map_file(path), path); }

NgramModel NgramModel::from_bytes(Mapping bytes, const std::string& name) {
  const std::span<const std::byte> file{bytes.data(), bytes.size()};
  if (is_ngram_file(file)) return NgramModel(std::move(bytes), name);
  return NgramModel(trie_to_memory(bytes, name), name);
}

NgramModel::NgramModel(Mapping bytes, std::string name)
    : name_(std::move(name)), bytes_(std::move(bytes)) {
  header_ = read_header({bytes_.data(), bytes_.size()}, name_);
  const NgramLayout layout = layout_of(header_);
  const auto words = [&](uint64_t at) {
    return reinterpret_cast<const int32_t*>(bytes_.data() + at);
  };
  for (int d = 0; d < order(); ++d) {
    const LevelLayout& from = layout.level[d];
    Level& level = level_[d];
    const bool deepest = d + 1 == order();
    level.size = header_.level_size[d];
    level.shift = deepest ? static_cast<int>(header_.count_bits) : 0;
    level.word = words(from.words);
    if (!deepest) level.info = reinterpret_cast<const NodeInfo*>(bytes_.data() + from.info);
    level.indexes = from.indexes;
    for (int h = 0; h < from.indexes; ++h) level.index[h] = words(from.index[h]);
  }
  large_ = {reinterpret_cast<const LargeCount*>(bytes_.data() + layout.large),
            header_.large_counts};
}

void NgramModel::damaged(const char* what) const {
  fail<std::runtime_error>(
      name_, ": ", what, "; the file is damaged: `sglang-dart ngram inspect --verify` tells more");
}

std::string_view NgramModel::metadata() const {
  return {reinterpret_cast<const char*>(bytes_.data()) + sizeof(NgramHeader),
          header_.metadata_bytes};
}

uint64_t NgramModel::node_count() const {
  uint64_t nodes = 1;
  for (const uint32_t size : header_.level_size) nodes += size;
  return nodes;
}

int32_t NgramModel::token(int level, uint32_t node) const {
  const Level& at = level_[level - 1];
  return at.word[node] >> at.shift;
}

uint32_t NgramModel::count(int level, uint32_t node) const {
  const Level& at = level_[level - 1];
  if (at.info != nullptr) return at.info[node].count;
  const uint32_t mask = (1u << at.shift) - 1;
  const uint32_t code = static_cast<uint32_t>(at.word[node]) & mask;
  return code != mask ? code : large_count(node);
}

uint32_t NgramModel::large_count(uint32_t node) const {
  const auto at = std::lower_bound(large_.begin(), large_.end(), node,
                                   [](const LargeCount& a, uint32_t b) { return a.node < b; });
  if (at == large_.end() || at->node != node) damaged("a count is missing");
  return at->count;
}

std::pair<uint32_t, uint32_t> NgramModel::children(int level, uint32_t node) const {
  const NodeInfo* info = level_[level - 1].info;
  if (info == nullptr) return {0, 0};
  const uint32_t begin = info[node].first_child;
  const uint32_t end = info[node + 1].first_child;
  if (begin > end || end > level_[level].size) damaged("a range of children is out of bounds");
  return {begin, end};
}

NgramModel::Probe NgramModel::start(const Range& range, int32_t token) const {
  const Level& level = *range.level;
  const int32_t highest = kPaddingWord >> level.shift;
  const auto capped = static_cast<uint32_t>(std::clamp(token, -1, highest));
  // The token's highest word; -1 lies below all words.
  const auto key = static_cast<int32_t>(((capped + 1) << level.shift) - 1);
  Probe probe{token, key, range.begin[range.top], range.end[range.top]};
  // A range may be wider than a line above the last stride only.
  while (probe.end - probe.begin > kFanout) {
    const uint32_t middle = probe.begin + (probe.end - probe.begin) / 2;
    (level.stride(range.top)[middle] <= key ? probe.begin : probe.end) = middle;
  }
  return probe;
}

void NgramModel::descend(const Range& range, int h, Probe& probe) const {
  const int32_t* words = range.level->stride(h);
  const uint32_t after =
      probe.begin + count_up_to(words + probe.begin, probe.end - probe.begin, probe.key);
  // The word is in the block that entry `after - 1` opens, or before the first entry.
  const bool first = after == range.begin[h];
  probe.begin = first ? range.begin[h - 1] : (after - 1) * kFanout;
  probe.end =
      static_cast<uint32_t>(std::min<uint64_t>(uint64_t{after} * kFanout, range.end[h - 1]));
}

uint32_t NgramModel::finish(const Range& range, const Probe& probe) const {
  const Level& level = *range.level;
  const uint32_t after =
      probe.begin + count_up_to(level.word + probe.begin, probe.end - probe.begin, probe.key);
  // A range is never empty, so the node below its first is either in the level or wraps around.
  const uint32_t node = after - (after != range.begin[0] ? 1 : 0);
  return after != range.begin[0] && level.word[node] >> level.shift == probe.token ? node : kAbsent;
}

uint32_t NgramModel::search(const Range& range, int32_t token) const {
  Probe probe = start(range, token);
  for (int h = range.top; h > 0; --h) descend(range, h, probe);
  return finish(range, probe);
}

// All tokens take one stride before any takes the next, so that their cache misses overlap.
void NgramModel::search_all(const Range& range, std::span<const int32_t> tokens,
                            uint32_t* found) const {
  std::array<Probe, kBatch> probes;
  const Level& level = *range.level;
  for (size_t i = 0; i < tokens.size(); ++i) probes[i] = start(range, tokens[i]);
  for (int h = range.top; h > 0; --h) {
    const int32_t* below = level.stride(h - 1);
    for (size_t i = 0; i < tokens.size(); ++i) {
      descend(range, h, probes[i]);
      __builtin_prefetch(below + probes[i].begin);
    }
  }
  for (size_t i = 0; i < tokens.size(); ++i) {
    found[i] = finish(range, probes[i]);
    if (level.info != nullptr && found[i] != kAbsent) __builtin_prefetch(level.info + found[i]);
  }
}

void NgramModel::prefetch(const Range& range) const {
  const int32_t* top = range.level->stride(range.top) + range.begin[range.top];
  // 16 words at any place span two cache lines.
  __builtin_prefetch(top);
  __builtin_prefetch(top + kFanout);
}

uint32_t NgramModel::child(int level, uint32_t node, int32_t token) const {
  if (level == 0) return first_token(token);
  const auto [begin, end] = children(level, node);
  if (begin == end) return kAbsent;
  return search(Range(level_[level], begin, end), token);
}

uint32_t NgramModel::first_token(int32_t token) const {
  const Level& level = level_[0];
  if (token < 0 || level.size == 0) return kAbsent;
  // Tokens ascend without repetition, so the token stands at its own index or before it; just
  // before it, since a corpus lacks few tokens of a vocabulary.
  const uint32_t last = std::min(static_cast<uint32_t>(token), level.size - 1);
  const uint32_t first = last - std::min(last, kFanout - 1);
  if (level.word[first] > token) return search(Range(level, 0, last), token);
  const uint32_t node = first + count_up_to(level.word + first, last - first + 1, token) - 1;
  return level.word[node] == token ? node : kAbsent;
}

NgramModel::Context NgramModel::empty_context() const {
  Context context;
  context.node.fill(kAbsent);
  return context;
}

NgramModel::Context NgramModel::find(std::span<const int32_t> tokens) const {
  Context context = empty_context();
  const size_t longest = std::min<size_t>(tokens.size(), order() - 1);
  for (const int32_t token : tokens.last(longest)) context = extend(context, token);
  return context;
}

NgramModel::Context NgramModel::extend(const Context& context, int32_t token) const {
  Context next = empty_context();
  next.node[0] = child(0, 0, token);
  for (int l = 1; l < order() - 1; ++l) {
    if (context.node[l - 1] != kAbsent) next.node[l] = child(l, context.node[l - 1], token);
    // What a lookup after this context reads first.
    if (next.node[l] != kAbsent) __builtin_prefetch(level_[l].info + next.node[l]);
  }
  return next;
}

void NgramModel::probability(const Context& context, std::span<const int32_t> candidates,
                             std::span<float> probability,
                             std::span<int32_t> matched_length) const {
  std::fill(probability.begin(), probability.end(), 0.0f);
  std::fill(matched_length.begin(), matched_length.end(), 0);
  // Of each suffix by length: what is looked into first is asked for before any is searched.
  std::array<std::pair<uint32_t, uint32_t>, kMaxOrder> range{};
  for (int l = order() - 1; l >= 1; --l) {
    if (context.node[l - 1] == kAbsent) continue;
    range[l] = children(l, context.node[l - 1]);
    if (range[l].first != range[l].second)
      prefetch(Range(level_[l], range[l].first, range[l].second));
  }
  for (size_t start = 0; start < candidates.size(); start += kBatch) {
    // Places and tokens of the candidates that no suffix has been seen with yet.
    std::array<uint32_t, kBatch> open;
    std::array<int32_t, kBatch> token;
    std::array<uint32_t, kBatch> found;
    size_t left = std::min(kBatch, candidates.size() - start);
    for (size_t j = 0; j < left; ++j) {
      open[j] = static_cast<uint32_t>(start + j);
      token[j] = candidates[start + j];
    }
    for (int l = order() - 1; l >= 1 && left > 0; --l) {
      const auto [begin, end] = range[l];
      if (begin == end) continue;
      const uint32_t seen = count(l, context.node[l - 1]);
      if (seen == 0) damaged("a node with children has the count 0");
      // Reciprocal first, then one product: a division would differ in the last bit.
      const float reciprocal = 1.0f / static_cast<float>(seen);
      search_all(Range(level_[l], begin, end), {token.data(), left}, found.data());
      size_t still = 0;
      for (size_t j = 0; j < left; ++j) {
        if (found[j] != kAbsent) {
          probability[open[j]] = static_cast<float>(count(l + 1, found[j])) * reciprocal;
          if (!matched_length.empty()) matched_length[open[j]] = l;
        } else {
          open[still] = open[j];
          token[still++] = token[j];
        }
      }
      left = still;
    }
  }
}

}  // namespace dart
