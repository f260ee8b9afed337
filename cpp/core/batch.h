// Growth for a whole batch: a request per thread, the same result for any number of threads.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "core/continuity.h"
#include "core/grow.h"
#include "core/tree.h"
#include "support/thread_pool.h"

namespace dart {

// What the requests of a batch hold, request-major.
struct RequestBatch {
  int size;                       // bs
  std::span<const int64_t> root;  // [bs] newest committed token of each
  std::span<const int64_t> end;   // [bs, E] tokens that end the answer; -1 fills up; may be empty
  std::span<const int64_t> tail;  // [bs, T] newest committed tokens, root last; may be empty
};

// Continuity is left out where the model is null.
struct ContinuityChoice {
  const NgramModel* model;
  Continuity::Options options;
};

// A drafter's proposal.
struct CandidateBatch {
  int levels;                       // D
  int count;                        // K
  std::span<const int64_t> token;   // [bs, D, K]
  std::span<const float> log_prob;  // [bs, D, K]; -inf where a rank is unused
};

// Trees of N = budget + 1 nodes a request. Everything after `score` may be empty.
struct TreeBatch {
  int width;                                     // N
  std::span<int64_t> token;                      // [bs, N]
  std::span<int32_t> parent, depth;              // [bs, N]
  std::span<float> score;                        // [bs, N]
  std::span<const int64_t> length;               // [bs] committed tokens before the root; input
  std::span<int64_t> position;                   // [bs, N] written if `length` is given
  std::span<int64_t> first_child, next_sibling;  // [bs, N] written together
  std::span<uint8_t> mask;                       // [bs, N, N]
  std::span<uint64_t> mask_bits;                 // [bs, N, mask_words(N)]
};

// Row `index` of an array whose first axis is the request; empty if the array is.
template <typename T>
std::span<T> row(std::span<T> array, size_t index, size_t size) {
  return array.empty() ? array : array.subspan(index * size, size);
}

// Keeps the best nodes of every ledger, see prune().
struct LedgerBatch {
  int size;                         // S
  std::span<const int64_t> token;   // [bs, S]
  std::span<const int32_t> parent;  // [bs, S]
  std::span<const int32_t> depth;   // [bs, S]
  std::span<const float> score;     // [bs, S]
};
void prune_batch(ThreadPool& pool, int requests, const LedgerBatch& ledgers, float depth_bonus,
                 const TreeBatch& trees);

// Packs every tree: reads parent, depth and length, writes what is there.
void pack_batch(ThreadPool& pool, int requests, const TreeBatch& trees);

// Children of one level in the form that growth reads.
class ChildrenBuffer {
 public:
  // Converts n tokens and weighs their log-probabilities. Throws std::invalid_argument for a used
  // token outside [0, 2^31).
  void assign(std::span<const int64_t> token, std::span<const float> log_prob, float logit_weight,
              std::span<const int64_t> end);
  // The same under every path; `count` under each path.
  Children shared() const;
  Children each(int count) const;

 private:
  std::vector<int32_t> token_;
  std::vector<float> step_;
  std::vector<uint8_t> end_;
  bool sorted_;
};

// Grows trees whose scores depend on level, candidate and continuity only.
// Holds the working memory of each thread; calls from several threads run one after the other.
class Grower {
 public:
  // logit_weight: of each level's log-probabilities, > 0; one number a level.
  Grower(ThreadPool& pool, std::vector<float> logit_weight, const ContinuityChoice& continuity)
      : pool_(pool),
        logit_weight_(std::move(logit_weight)),
        continuity_(continuity),
        workers_(pool.size()) {}

  int levels() const { return static_cast<int>(logit_weight_.size()); }
  bool uses_ngram() const { return continuity_.model != nullptr; }

  // Grows, keeps, writes and packs the trees. The recipe has as many levels as the candidates,
  // at most levels().
  void grow(const Recipe& recipe, const RequestBatch& requests, const CandidateBatch& candidates,
            const TreeBatch& trees);

 private:
  struct Worker {
    Growth growth;
    Continuity continuity;
    ChildrenBuffer children;
  };

  ThreadPool& pool_;
  const std::vector<float> logit_weight_;
  const ContinuityChoice continuity_;
  std::vector<Worker> workers_;
};

// Grows trees whose scores depend on the path: the caller scores every frontier.
// One thread at a time.
class StagedGrower {
 public:
  StagedGrower(ThreadPool& pool, const ContinuityChoice& continuity)
      : pool_(pool), continuity_(continuity) {}

  // Begins a batch of trees. Copies what it needs.
  void start(const Recipe& recipe, const RequestBatch& requests, int budget);

  // What start() was given.
  int size() const { return static_cast<int>(requests_.size()); }
  int budget() const { return budget_; }
  const Recipe& recipe() const { return recipe_; }
  bool uses_ngram() const { return continuity_.model != nullptr; }

  // Paths of the widest frontier, P; 0 once every tree is grown.
  int width() const;
  // Writes each frontier, [bs, width()]: the last token of its paths, and the position of their
  // parents in the frontier before. 0 fills up. count [bs]: how many paths each has.
  void frontier(std::span<int64_t> token, std::span<int64_t> origin,
                std::span<int64_t> count) const;
  // Scores the frontiers' children: token, step [bs, width(), count]; -inf is unused.
  // What stands beyond a request's own paths is not read.
  void extend(std::span<const int64_t> token, std::span<const float> step, int count);
  // Writes and packs the trees; width must be the budget + 1.
  void finish(const TreeBatch& trees);

 private:
  struct Request {
    Growth growth;
    Continuity continuity;
    ChildrenBuffer children;
    std::vector<int64_t> end;
  };

  ThreadPool& pool_;
  const ContinuityChoice continuity_;
  Recipe recipe_{};
  int budget_ = 0;
  std::vector<Request> requests_;
};

}  // namespace dart
