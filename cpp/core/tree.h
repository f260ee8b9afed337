// What a draft tree looks like in memory, and the one order of its nodes.
#pragma once

#include <bit>
#include <cstdint>
#include <limits>
#include <span>

namespace dart {

inline constexpr float kUnused = -std::numeric_limits<float>::infinity();

// A scored path: its last token, and the node that it extends. Node 0 is the root.
struct Node {
  int32_t token;
  int32_t parent;  // index of an earlier node; -1 at the root
  int32_t depth;
  float score;  // summed along the path; 0 at the root
};

// The one order of nodes: higher score first; on a tie, the node scored earlier (lower index).
// A rank is that order as one integer: the greater rank comes first. Paths marked `last` rank
// below all others. index < 2^31; score is not NaN.
using NodeRank = uint64_t;

constexpr NodeRank node_rank(float score, uint32_t index, bool last = false) {
  // Adding +0 makes -0 equal to it, as it is under ==.
  const uint32_t bits = std::bit_cast<uint32_t>(score + 0.0f);
  // IEEE floats order like integers of sign and magnitude.
  const uint32_t ordered = bits >> 31 ? ~bits : bits | 0x8000'0000u;
  return uint64_t{!last} << 63 | uint64_t{ordered} << 31 | (0x7fff'ffffu - index);
}

constexpr uint32_t rank_index(NodeRank rank) { return 0x7fff'ffffu - (rank & 0x7fff'ffffu); }

constexpr bool rank_is_last(NodeRank rank) { return rank >> 63 == 0; }

constexpr float rank_score(NodeRank rank) {
  const uint32_t ordered = static_cast<uint32_t>(rank >> 31);
  return std::bit_cast<float>(ordered >> 31 ? ordered & 0x7fff'ffffu : ~ordered);
}

// One request's kept nodes, parents before children, in the order of scoring; all of size N.
// Padding comes last: token 0, parent -1, depth 0, score -inf.
struct TreeSpan {
  std::span<int64_t> token;
  std::span<int32_t> parent;
  std::span<int32_t> depth;
  std::span<float> score;

  int width() const { return static_cast<int>(token.size()); }
};

// The same tree in the form that verification reads. An empty span is not written.
struct PackedSpan {
  std::span<int64_t> position;      // [N] committed length + depth
  std::span<int64_t> first_child;   // [N] node, or -1
  std::span<int64_t> next_sibling;  // [N] node, or -1
  std::span<uint8_t> mask;          // [N * N] 1 where row i sees node j: itself and its ancestors
  std::span<uint64_t>
      mask_bits;  // [N * mask_words(N)] the same, node j in bit j % 64 of word j / 64
};

constexpr int mask_words(int width) { return (width + 63) / 64; }

}  // namespace dart
