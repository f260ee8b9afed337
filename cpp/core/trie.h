// The published .trie file: read and checked as a whole, converted in bounded memory, written.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "core/ngram_writer.h"
#include "core/progress.h"
#include "support/mapped_file.h"

namespace dart {

class NgramModel;

struct TrieOptions {
  // Stamped on the result; a token outside it is an error unless its size is 0.
  Vocabulary vocabulary;
  // Raise counts that children outnumber instead of refusing the file.
  bool repair_counts = false;
  // Holds scratch files that the kernel may page out; empty: memory alone.
  std::string folder;
  std::string metadata = "{}";
  Progress progress;
};

// Reads a .trie whose nodes may stand in any order. Throws std::invalid_argument, "name: reason",
// unless it is exactly one tree with plausible counts: nothing of it is taken on trust.
// One sequential pass over the file a level, one more a level whose nodes stand before their
// parents. Needs 5 bytes a node beside the result.
NgramLevels read_trie(const Mapping& file, const std::string& name, const TrieOptions& options);

// The compact form of a .trie.
Mapping trie_to_memory(const Mapping& file, const std::string& name);

// Writes the compact form of the .trie `from` to `to`; returns its size in bytes.
uint64_t convert_trie(const std::string& from, const std::string& to, const TrieOptions& options);

// Writes `model` as a .trie, levels in order, children ascending by token: the same model gives
// the same bytes. Verifies the model first. Throws std::invalid_argument if a count exceeds the
// format's 2^31 - 1.
void write_trie(const NgramModel& model, const std::string& to, const Progress& progress);

}  // namespace dart
