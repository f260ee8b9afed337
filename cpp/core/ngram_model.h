// An n-gram model to look up: the compact file, mapped, or a published .trie held in memory.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "core/ngram_format.h"
#include "support/mapped_file.h"

namespace dart {

// Const methods are thread-safe. A damaged file that open() could not notice without reading all
// of it makes them throw std::runtime_error; they never read outside the file.
class NgramModel {
 public:
  static constexpr uint32_t kAbsent = 0xffffffff;

  // Where the suffixes of a text stand: node[l - 1] is the node of its last l tokens in level l,
  // kAbsent if the model has not seen them.
  struct Context {
    std::array<uint32_t, kMaxOrder - 1> node;
  };

  // Maps a compact file (constant time, checks the header), or reads a whole .trie into memory
  // (checks everything). Throws std::invalid_argument: path, reason, remedy.
  static NgramModel open(const std::string& path);
  // As open(), of a file already in memory. `name` stands in errors.
  static NgramModel from_bytes(Mapping bytes, const std::string& name);

  int order() const { return static_cast<int>(header_.order); }
  const NgramHeader& header() const { return header_; }
  std::string_view metadata() const;
  uint64_t node_count() const;
  uint64_t bytes() const { return bytes_.size(); }

  // The contexts of the empty text, and of `tokens`; only the last order() - 1 matter.
  Context empty_context() const;
  Context find(std::span<const int32_t> tokens) const;
  // The contexts of a text that goes on with `token`.
  Context extend(const Context& context, int32_t token) const;

  // How probable each candidate is after the context: count(longest seen suffix + candidate) as
  // float32 times the float32 reciprocal of count(suffix); 0 if no suffix was seen with it.
  // matched_length (may be empty): tokens of that suffix, 0 if none.
  void probability(const Context& context, std::span<const int32_t> candidates,
                   std::span<float> probability, std::span<int32_t> matched_length) const;

  // The arrays of level l (1 .. order): the node's token, its count, and its children in level
  // l + 1 as [first, second). Node indices must be below level_size(level).
  uint32_t level_size(int level) const { return header_.level_size[level - 1]; }
  int32_t token(int level, uint32_t node) const;
  uint32_t count(int level, uint32_t node) const;
  std::pair<uint32_t, uint32_t> children(int level, uint32_t node) const;
  // The child of `node` (level 0: of the root) with this token, or kAbsent.
  uint32_t child(int level, uint32_t node, int32_t token) const;

  // Reads the whole file: checksums, order of tokens, ranges, counts, index. Throws
  // std::runtime_error with the first fault.
  void verify() const;

 private:
  struct Level {
    uint32_t size = 0;
    // Deepest level: token << shift | count code; above it the token alone (shift 0).
    int shift = 0;
    const int32_t* word = nullptr;
    const NodeInfo* info = nullptr;
    int indexes = 0;
    std::array<const int32_t*, kMaxIndexes> index{};

    const int32_t* stride(int h) const { return h == 0 ? word : index[h - 1]; }
  };
  struct Range;
  struct Probe;
  static constexpr size_t kBatch = 64;

  NgramModel(Mapping bytes, std::string name);

  Probe start(const Range& range, int32_t token) const;
  void descend(const Range& range, int h, Probe& probe) const;
  uint32_t finish(const Range& range, const Probe& probe) const;
  uint32_t search(const Range& range, int32_t token) const;
  uint32_t first_token(int32_t token) const;
  void prefetch(const Range& range) const;
  void search_all(const Range& range, std::span<const int32_t> tokens, uint32_t* found) const;
  uint32_t large_count(uint32_t node) const;
  [[noreturn]] void damaged(const char* what) const;

  void verify_checksums(const NgramLayout& layout) const;
  void verify_level(int level) const;
  void verify_children(int level, uint32_t node, std::pair<uint32_t, uint32_t> range) const;
  void verify_index(int level) const;
  void verify_large_counts() const;

  std::string name_;
  Mapping bytes_;
  NgramHeader header_{};
  std::array<Level, kMaxOrder> level_;
  std::span<const LargeCount> large_;
};

}  // namespace dart
