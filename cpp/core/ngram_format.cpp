#include "core/ngram_format.h"

#include <cstring>

#include "support/check.h"

namespace dart {
namespace {

constexpr uint64_t kLine = 64;

uint64_t up_to_line(uint64_t offset) { return (offset + kLine - 1) / kLine * kLine; }

// A line more than needed: a search reads 16 words from any of them on.
uint64_t end_of_words(uint64_t begin, uint64_t words) {
  return up_to_line(begin + 4 * words) + kLine;
}

LevelLayout level_layout(uint64_t begin, uint32_t size, bool deepest) {
  LevelLayout level;
  level.begin = level.words = begin;
  uint64_t offset = end_of_words(begin, size);
  if (!deepest) {
    level.info = offset;
    offset = up_to_line(offset + sizeof(NodeInfo) * (uint64_t{size} + 1));
  }
  uint64_t entries = size;
  while (entries > kFanout && level.indexes < kMaxIndexes) {
    entries = (entries + kFanout - 1) / kFanout;
    level.index[level.indexes] = offset;
    level.index_size[level.indexes] = static_cast<uint32_t>(entries);
    ++level.indexes;
    offset = end_of_words(offset, entries);
  }
  level.end = offset;
  return level;
}

using CrcTables = std::array<std::array<uint32_t, 256>, 8>;

// Table k advances a byte that has k more bytes behind it ("slicing by eight").
constexpr CrcTables make_crc_tables() {
  CrcTables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0xedb88320u : 0u);
    tables[0][byte] = crc;
  }
  for (size_t k = 1; k < tables.size(); ++k) {
    for (size_t byte = 0; byte < 256; ++byte) {
      const uint32_t before = tables[k - 1][byte];
      tables[k][byte] = (before >> 8) ^ tables[0][before & 0xff];
    }
  }
  return tables;
}

constexpr CrcTables kCrcTables = make_crc_tables();

}  // namespace

uint32_t crc32(std::span<const std::byte> bytes, uint32_t seed) {
  const auto& t = kCrcTables;
  uint32_t crc = ~seed;
  size_t i = 0;
  for (; i + 8 <= bytes.size(); i += 8) {
    uint32_t low;
    uint32_t high;
    std::memcpy(&low, bytes.data() + i, 4);
    std::memcpy(&high, bytes.data() + i + 4, 4);
    low ^= crc;
    crc = t[7][low & 0xff] ^ t[6][(low >> 8) & 0xff] ^ t[5][(low >> 16) & 0xff] ^ t[4][low >> 24] ^
          t[3][high & 0xff] ^ t[2][(high >> 8) & 0xff] ^ t[1][(high >> 16) & 0xff] ^
          t[0][high >> 24];
  }
  for (; i < bytes.size(); ++i) {
    crc = (crc >> 8) ^ t[0][(crc ^ static_cast<uint32_t>(bytes[i])) & 0xff];
  }
  return ~crc;
}

int count_bits_for(uint64_t vocab_size) {
  return 31 - std::bit_width(vocab_size == 0 ? 0 : vocab_size - 1);
}

NgramLayout layout_of(const NgramHeader& header) {
  NgramLayout layout;
  layout.metadata = sizeof(NgramHeader);
  uint64_t offset = up_to_line(layout.metadata + header.metadata_bytes);
  for (uint32_t d = 0; d < header.order; ++d) {
    layout.level[d] = level_layout(offset, header.level_size[d], d + 1 == header.order);
    offset = layout.level[d].end;
  }
  layout.large = offset;
  layout.file_bytes = offset + sizeof(LargeCount) * header.large_counts;
  return layout;
}

bool is_ngram_file(std::span<const std::byte> file) {
  return file.size() >= kNgramMagic.size() &&
         std::memcmp(file.data(), kNgramMagic.data(), kNgramMagic.size()) == 0;
}

NgramHeader read_header(std::span<const std::byte> file, const std::string& name) {
  DART_CHECK(is_ngram_file(file), name, ": not a compact n-gram file (wrong first 8 bytes)");
  DART_CHECK(file.size() >= sizeof(NgramHeader), name, ": ", file.size(),
             " bytes are too few for the header of ", sizeof(NgramHeader), "; the file is cut off");
  NgramHeader header;
  std::memcpy(&header, file.data(), sizeof(header));
  DART_CHECK(header.version == kNgramVersion, name, ": format version ", header.version,
             ", this reader knows version ", kNgramVersion, "; build or convert the file again");
  const size_t covered = offsetof(NgramHeader, header_crc);
  DART_CHECK(crc32(file.first(covered)) == header.header_crc, name,
             ": the header's checksum does not match; the file is damaged");
  DART_CHECK(header.order >= kMinOrder && header.order <= kMaxOrder, name, ": order ", header.order,
             " is outside ", kMinOrder, "..", kMaxOrder);
  for (size_t d = header.order; d < header.level_size.size(); ++d) {
    DART_CHECK(header.level_size[d] == 0, name, ": ", header.level_size[d],
               " n-grams are longer than the order ", header.order);
  }
  DART_CHECK(header.count_bits <= 31, name, ": ", header.count_bits, " count bits exceed 31");
  const uint64_t expected = layout_of(header).file_bytes;
  DART_CHECK(header.file_bytes == expected && file.size() == expected, name, ": ", file.size(),
             " bytes, its header asks for ", expected,
             "; the file is cut off or has bytes too many");
  return header;
}

}  // namespace dart
