// Puts an n-gram model together, level by level, and writes the compact file.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/ngram_format.h"
#include "support/mapped_file.h"

namespace dart {

// Whose token ids the model holds; what makes a file belong to one target.
struct Vocabulary {
  uint32_t size = 0;                       // 0: unknown
  std::array<unsigned char, 32> sha256{};  // zeros: unknown
};

// The nodes of a model, one array a level, before they become a file. Levels ascend by path, so
// the children of a node stand side by side.
class NgramLevels {
 public:
  // `folder` holds the scratch files ("": memory).
  NgramLevels(int order, const std::string& folder);

  // Tokens stay below `bound`; said before the deepest level gets a node.
  void set_token_bound(uint64_t bound);

  int order() const { return order_; }
  uint64_t size(int level) const { return words_[level - 1].size(); }
  int32_t token(int level, uint64_t node) const {
    return words_[level - 1][node] >> (level == order_ ? count_bits_ : 0);
  }
  NodeInfo& info(int level, uint64_t node) { return info_[level - 1][node]; }

  void resize(int level, uint64_t size);
  void push_back(int level, int32_t token);
  void set_token(int level, uint64_t node, int32_t token);
  // Once a node; its token is set before.
  void set_count(int level, uint64_t node, uint32_t count);

  // Counted occurrences of any token, the count of the root.
  uint64_t total = 0;
  Vocabulary vocabulary;
  // JSON text for people: where the model comes from.
  std::string metadata = "{}";

  // Raises the count of every node that its children outnumber to the sum of their counts.
  void repair_counts();

  // Writes the file at `path`; it appears when it is complete. Returns its size in bytes.
  uint64_t write(const std::string& path);
  // The same file in memory.
  Mapping to_memory();

 private:
  void sort_large();
  NgramHeader finish();
  void fill(const NgramHeader& header, std::span<std::byte> file) const;

  int order_;
  int count_bits_ = 0;
  std::vector<ScratchArray<int32_t>> words_;
  std::vector<ScratchArray<NodeInfo>> info_;
  std::vector<LargeCount> large_;
};

// Turns n-grams in ascending order into levels: each n-gram adds its count to every node on its
// path.
class NgramBuilder {
 public:
  NgramBuilder(int order, Vocabulary vocabulary, const std::string& folder);
  NgramBuilder(const NgramBuilder&) = delete;
  NgramBuilder& operator=(const NgramBuilder&) = delete;

  // gram [rows, order] int32: token ids, -1 after the end of an n-gram that its document cut
  // short (-1 sorts first). count [rows]. Rows must ascend strictly, over all calls.
  void append(std::span<const int32_t> gram, std::span<const int64_t> count);

  // Closes the last path. append() must not follow.
  NgramLevels& finish();

 private:
  void open_node(int level, int32_t token);
  void close_from(int level);

  NgramLevels levels_;
  // The path of the last row, and what its open nodes have counted.
  std::array<int32_t, kMaxOrder> path_;
  std::array<uint64_t, kMaxOrder> sum_{};
  int open_ = 0;
};

}  // namespace dart
