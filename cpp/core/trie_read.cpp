#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "core/trie.h"
#include "support/check.h"

namespace dart {
namespace {

constexpr uint64_t kFileHeader = 16;
constexpr uint64_t kRecordHeader = 24;
constexpr uint64_t kChildEntry = 12;
// Every node has one record, and every node but the root one child entry.
constexpr uint64_t kBytesPerNode = kRecordHeader + kChildEntry;
constexpr uint64_t kDropStep = uint64_t{64} << 20;

template <typename T>
T load(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

struct Record {
  uint64_t id;
  int32_t token;
  uint64_t parent;
  int32_t count;
  uint64_t children;
  const std::byte* child;

  int32_t child_token(uint64_t i) const { return load<int32_t>(child + i * kChildEntry); }
  uint64_t child_id(uint64_t i) const { return load<uint64_t>(child + i * kChildEntry + 4); }
};

// Places the nodes level by level: a node's place is known once its parent's record is read.
class TrieReader {
 public:
  TrieReader(const Mapping& file, const std::string& name, const TrieOptions& options)
      : file_(file),
        name_(name),
        options_(options),
        stage_(options.folder),
        place_(options.folder) {}

  NgramLevels read();

 private:
  // What is known of a node, two steps a level.
  static constexpr uint8_t kUnseen = 0;
  static constexpr uint8_t placed(int level) { return static_cast<uint8_t>(2 * level); }
  static constexpr uint8_t counted(int level) { return static_cast<uint8_t>(2 * level + 1); }

  void read_header();
  template <typename Visit>
  void scan(Visit&& visit);
  void check_record(const Record& record);
  void place_children(const Record& record, int level);
  void set_count(const Record& record, int level);
  uint32_t checked_count(const Record& record, int level, uint64_t parent_place);
  void open_level(int level);

  template <typename... Parts>
  [[noreturn]] void refuse(const Parts&... parts) const {
    fail<std::invalid_argument>(name_, ": ", parts...);
  }

  const Mapping& file_;
  const std::string& name_;
  const TrieOptions& options_;
  int order_ = 0;
  uint64_t nodes_ = 0;
  int scans_ = 0;
  int32_t highest_token_ = 0;
  std::array<uint64_t, kMaxOrder + 1> counted_{};
  // By node id: its stage, and its index in its level once it is placed.
  ScratchArray<uint8_t> stage_;
  ScratchArray<uint32_t> place_;
  std::vector<std::pair<int32_t, uint64_t>> sorted_;
  // Assigned when the order is known.
  NgramLevels levels_{kMinOrder, ""};
};

void TrieReader::read_header() {
  if (file_.size() < kFileHeader) {
    refuse(file_.size(), " bytes are too few for a .trie header of ", kFileHeader,
           "; the file is empty or cut off");
  }
  const auto order = load<uint64_t>(file_.data());
  nodes_ = load<uint64_t>(file_.data() + 8);
  if (order < kMinOrder || order > kMaxOrder) {
    const bool swapped = order != 0 && order << 8 == 0;
    refuse("order ", order, " is outside ", kMinOrder, "..", kMaxOrder,
           swapped ? "; the file has big-endian numbers" : "; not an n-gram file, or damaged");
  }
  order_ = static_cast<int>(order);
  if (nodes_ < 1) refuse("0 nodes; a .trie holds at least its root");
  if (nodes_ > kMaxLevelSize) refuse(nodes_, " nodes exceed the limit of ", kMaxLevelSize);
  const uint64_t expected = kFileHeader + kRecordHeader + (nodes_ - 1) * kBytesPerNode;
  if (file_.size() != expected) {
    refuse(file_.size(), " bytes, but ", nodes_, " nodes take ", expected,
           "; the file is cut off, damaged or has bytes too many");
  }
}

// Calls visit(record) for every record in file order; a record never reaches past the file.
template <typename Visit>
void TrieReader::scan(Visit&& visit) {
  uint64_t offset = kFileHeader;
  uint64_t dropped = 0;
  for (uint64_t id = 0; id < nodes_; ++id) {
    const uint64_t rest = file_.size() - offset;
    if (rest < kRecordHeader) refuse("the record of node ", id, " is cut off");
    const std::byte* at = file_.data() + offset;
    const Record record{id,
                        load<int32_t>(at),
                        load<uint64_t>(at + 4),
                        load<int32_t>(at + 12),
                        load<uint64_t>(at + 16),
                        at + kRecordHeader};
    if (record.children > (rest - kRecordHeader) / kChildEntry) {
      refuse("node ", id, " has ", record.children, " children, more than the file has bytes for");
    }
    visit(record);
    offset += kRecordHeader + record.children * kChildEntry;
    if (offset - dropped >= kDropStep) {
      dropped = offset;
      drop_pages(file_, dropped);
      const auto scans = static_cast<uint64_t>(std::max(order_, scans_ + 1));
      if (options_.progress)
        options_.progress(scans_ * file_.size() + offset, scans * file_.size());
    }
  }
  if (offset != file_.size()) refuse(file_.size() - offset, " bytes follow the last node");
  drop_pages(file_, file_.size());
  ++scans_;
}

void TrieReader::check_record(const Record& record) {
  // The root's token, parent and count are never looked up; its count overflows in large files.
  if (record.id == 0) return;
  if (record.token < 0) refuse("node ", record.id, " has the negative token ", record.token);
  const uint32_t vocab_size = options_.vocabulary.size;
  if (vocab_size != 0 && static_cast<uint32_t>(record.token) >= vocab_size) {
    refuse("node ", record.id, " has token ", record.token, ", the vocabulary has ", vocab_size,
           " tokens; the file was built for another tokenizer");
  }
  if (record.parent >= nodes_) {
    refuse("node ", record.id, " has parent ", record.parent, ", but the last node is ",
           nodes_ - 1);
  }
  if (record.count < 0 && !options_.repair_counts) {
    refuse("node ", record.id, " has the negative count ", record.count,
           "; `sglang-dart ngram convert --repair-counts` mends counts");
  }
  highest_token_ = std::max(highest_token_, record.token);
}

// Gives the children of a placed node of `level` their places in the next level.
void TrieReader::place_children(const Record& record, int level) {
  sorted_.clear();
  for (uint64_t i = 0; i < record.children; ++i) {
    sorted_.emplace_back(record.child_token(i), record.child_id(i));
  }
  std::sort(sorted_.begin(), sorted_.end());
  uint64_t place = level == 0 ? 0 : levels_.info(level, place_[record.id]).first_child;
  for (size_t i = 0; i < sorted_.size(); ++i, ++place) {
    const auto [token, id] = sorted_[i];
    if (id >= nodes_) {
      refuse("node ", record.id, " has child ", id, ", but the last node is ", nodes_ - 1);
    }
    if (id == 0) refuse("node ", record.id, " has the root as its child");
    if (stage_[id] != kUnseen) refuse("node ", id, " is listed as a child twice");
    if (token < 0) refuse("node ", record.id, " lists a child with the negative token ", token);
    if (i > 0 && token == sorted_[i - 1].first) {
      refuse("node ", record.id, " has two children with token ", token);
    }
    stage_[id] = placed(level + 1);
    place_[id] = static_cast<uint32_t>(place);
    // A deepest-level word holds it beside a count, so it is checked against the bound first.
    if (token > highest_token_ && level > 0) {
      refuse("node ", record.id, " lists token ", token, " that no node has");
    }
    levels_.set_token(level + 1, place, token);
  }
}

uint32_t TrieReader::checked_count(const Record& record, int level, uint64_t parent_place) {
  const auto count = static_cast<uint32_t>(std::max(record.count, 0));
  if (options_.repair_counts) return count;
  const char* remedy = "; `sglang-dart ngram convert --repair-counts` mends counts";
  if (count == 0 && record.children > 0) {
    refuse("node ", record.id, " has the count 0 but ", record.children, " children", remedy);
  }
  if (level > 1 && count > levels_.info(level - 1, parent_place).count) {
    refuse("node ", record.id, " has the count ", count, ", its parent ", record.parent, " only ",
           levels_.info(level - 1, parent_place).count, remedy);
  }
  return count;
}

// Takes over a node's own record once its place in `level` is known.
void TrieReader::set_count(const Record& record, int level) {
  const uint32_t place = place_[record.id];
  if (levels_.token(level, place) != record.token) {
    refuse("node ", record.id, " has token ", record.token,
           ", but is listed as a child with token ", levels_.token(level, place));
  }
  // Only the node that lists this one has it in its range.
  uint64_t parent_place = 0;
  bool listed = record.parent == 0;
  if (level > 1) {
    parent_place = place_[record.parent];
    listed = stage_[record.parent] == counted(level - 1);
    if (listed) {
      const uint64_t begin = levels_.info(level - 1, parent_place).first_child;
      const uint64_t end = parent_place + 1 < levels_.size(level - 1)
                               ? levels_.info(level - 1, parent_place + 1).first_child
                               : levels_.size(level);
      listed = place >= begin && place < end;
    }
  }
  if (!listed) {
    refuse("node ", record.id, " names node ", record.parent,
           " as its parent, but another one lists it as a child");
  }
  levels_.set_count(level, place, checked_count(record, level, parent_place));
  if (level == order_ && record.children > 0) {
    refuse("node ", record.id, " has children at depth ", level + 1, ", but the order is ", order_);
  }
  // Becomes the first child's index when the whole level is counted.
  if (level < order_)
    levels_.info(level, place).first_child = static_cast<uint32_t>(record.children);
  stage_[record.id] = counted(level);
  ++counted_[level];
}

// Turns the numbers of children of a counted level into ranges of the next one.
void TrieReader::open_level(int level) {
  uint64_t first = 0;
  for (uint64_t node = 0; node < levels_.size(level); ++node) {
    first += std::exchange(levels_.info(level, node).first_child, static_cast<uint32_t>(first));
  }
  levels_.resize(level + 1, first);
}

NgramLevels TrieReader::read() {
  read_header();
  read_sequentially(file_);
  levels_ = NgramLevels(order_, options_.folder);
  stage_.resize(nodes_);
  place_.resize(nodes_);
  int64_t root_count = 0;
  // The root's record comes first, so one scan counts all of level 1.
  scan([&](const Record& record) {
    check_record(record);
    if (record.id == 0) {
      root_count = record.count;
      levels_.resize(1, record.children);
      stage_[0] = counted(0);
      place_children(record, 0);
    } else if (stage_[record.id] == placed(1)) {
      set_count(record, 1);
    }
  });
  levels_.vocabulary = options_.vocabulary;
  levels_.metadata = options_.metadata;
  levels_.set_token_bound(
      std::max<uint64_t>(uint64_t{highest_token_ + 1u}, options_.vocabulary.size));
  uint64_t reached = 1 + levels_.size(1);
  for (int level = 1; level < order_; ++level) {
    open_level(level);
    reached += levels_.size(level + 1);
    const auto count_below = [&](const Record& record) {
      if (stage_[record.id] == placed(level + 1)) set_count(record, level + 1);
    };
    scan([&](const Record& record) {
      if (stage_[record.id] == counted(level)) place_children(record, level);
      count_below(record);
    });
    if (counted_[level + 1] < levels_.size(level + 1)) scan(count_below);
  }
  if (reached < nodes_) {
    refuse(nodes_ - reached, " nodes cannot be reached from the root; their links form a cycle");
  }
  uint64_t sum = 0;
  if (options_.repair_counts) levels_.repair_counts();
  for (uint64_t node = 0; node < levels_.size(1); ++node) sum += levels_.info(1, node).count;
  levels_.total = std::max(sum, static_cast<uint64_t>(std::max<int64_t>(root_count, 0)));
  return std::move(levels_);
}

}  // namespace

NgramLevels read_trie(const Mapping& file, const std::string& name, const TrieOptions& options) {
  return TrieReader(file, name, options).read();
}

Mapping trie_to_memory(const Mapping& file, const std::string& name) {
  return read_trie(file, name, {}).to_memory();
}

uint64_t convert_trie(const std::string& from, const std::string& to, const TrieOptions& options) {
  return read_trie(map_file(from), from, options).write(to);
}

}  // namespace dart
