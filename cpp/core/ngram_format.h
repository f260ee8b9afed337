// The compact n-gram file: what its header holds and where each array stands. See docs/ngram.md.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace dart {

static_assert(std::endian::native == std::endian::little, "n-gram files are read in place");

inline constexpr int kMinOrder = 2;
inline constexpr int kMaxOrder = 6;

// Strides of the search index: entry i of index h is word 16^h * i of its level.
inline constexpr uint32_t kFanout = 16;
// A range of children spans at most the vocabulary; five strides leave few entries of any range.
inline constexpr int kMaxIndexes = 5;
// Fills the end of every array of words: no token is above it.
inline constexpr int32_t kPaddingWord = 0x7fffffff;
// Highest number of nodes of one level; node indices are 32 bits wide.
inline constexpr uint64_t kMaxLevelSize = 0xfffffffe;

// What a node above the deepest level holds beside its token.
struct NodeInfo {
  uint32_t count;
  // Its children are [first_child, next node's first_child) of the next level.
  uint32_t first_child;
};

// A deepest-level node whose count does not fit into its word.
struct LargeCount {
  uint32_t node;
  uint32_t count;
};

// The first 256 bytes, as they stand in the file.
struct NgramHeader {
  std::array<unsigned char, 8> magic;
  uint32_t version;
  uint32_t order;
  uint64_t file_bytes;
  uint64_t total;
  uint32_t vocab_size;
  uint32_t count_bits;
  std::array<uint32_t, kMaxOrder> level_size;
  std::array<unsigned char, 32> tokenizer_sha256;
  uint32_t large_counts;
  uint32_t metadata_bytes;
  uint32_t metadata_crc;
  std::array<uint32_t, kMaxOrder> level_crc;
  uint32_t large_crc;
  std::array<unsigned char, 116> zeros;
  uint32_t header_crc;
};
static_assert(sizeof(NgramHeader) == 256);

inline constexpr std::array<unsigned char, 8> kNgramMagic = {0x89, 'N', 'G',  'R',
                                                             'A',  'M', '\r', '\n'};
inline constexpr uint32_t kNgramVersion = 1;

// Where the arrays of one level stand, in bytes from the start of the file.
struct LevelLayout {
  uint64_t begin = 0;
  uint64_t words = 0;
  uint64_t info = 0;  // unused at the deepest level
  int indexes = 0;
  std::array<uint64_t, kMaxIndexes> index{};
  std::array<uint32_t, kMaxIndexes> index_size{};
  uint64_t end = 0;
};

// Follows from the numbers in the header alone, so a file holds no offset that could lie.
struct NgramLayout {
  uint64_t metadata = 0;
  std::array<LevelLayout, kMaxOrder> level;
  uint64_t large = 0;
  uint64_t file_bytes = 0;
};

NgramLayout layout_of(const NgramHeader& header);

// Bits of a deepest-level word that hold its count, when tokens stay below `vocab_size`.
int count_bits_for(uint64_t vocab_size);

// CRC-32 as in zlib; `seed` is the checksum of what came before.
uint32_t crc32(std::span<const std::byte> bytes, uint32_t seed = 0);

// Reads and checks the header against the bytes that follow. Throws std::invalid_argument that
// starts with `name`.
NgramHeader read_header(std::span<const std::byte> file, const std::string& name);

bool is_ngram_file(std::span<const std::byte> file);

}  // namespace dart
