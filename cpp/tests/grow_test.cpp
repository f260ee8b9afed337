// Growth of random batches against its definition: keep the whole ledger, prune it once.
// For sanitizer builds; the Python tests compare with torch.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <tuple>
#include <vector>

#include "core/batch.h"

namespace dart {
namespace {

struct Problem {
  Recipe recipe;
  int requests, levels, count, budget;
  std::vector<int64_t> root, end, token;
  std::vector<float> log_prob;
};

Problem random_problem(std::mt19937& random) {
  const auto below = [&](int n) { return static_cast<int>(random() % n); };
  Problem problem;
  problem.requests = 1 + below(6);
  problem.levels = 1 + below(6);
  problem.count = 1 + below(9);
  problem.budget = 1 + below(70);
  const bool every_child = below(2) == 1;
  problem.recipe = {every_child || below(3) > 0 ? 1 + below(12) : 0, every_child, below(2) == 1,
                    below(2) == 1 ? -0.25f : 0.0f, std::vector<float>(problem.levels, 0.5f)};
  // Coarse scores, so that ties are common.
  const int grid = 1 + below(4);
  for (int request = 0; request < problem.requests; ++request) {
    problem.root.push_back(request);
    for (int i = 0; i < 2; ++i) problem.end.push_back(below(problem.count + 2) - 1);
    for (int i = 0; i < problem.levels * problem.count; ++i) {
      problem.token.push_back(i % problem.count);
      problem.log_prob.push_back(
          below(8) == 0 ? kUnused : -static_cast<float>(below(12)) / static_cast<float>(grid));
    }
  }
  return problem;
}

// The steps of the simple algorithm for one request; returns the kept (parent, token, score).
class Definition {
 public:
  Definition(const Problem& problem, int request) : problem_(problem), request_(request) {
    nodes_.push_back({static_cast<int32_t>(problem.root[request]), -1, 0, 0});
    std::vector<int> frontier{0};
    int taken = 0;
    for (level_ = 0; level_ < problem.levels; ++level_) {
      int quota = problem.recipe.frontier;
      if (quota == 0) {
        const int left = problem.budget - taken, levels = problem.levels - level_;
        quota = std::min((left + levels - 1) / levels, (level_ == 0 ? 1 : share_) * problem.count);
        share_ = quota;
        taken += quota;
      }
      frontier = step(frontier, quota);
    }
  }

  std::vector<Node> kept() const {
    std::vector<int> order;
    for (int i = 1; i < static_cast<int>(nodes_.size()); ++i) order.push_back(i);
    const auto rank = [&](int i) {
      const Node& node = nodes_[i];
      return std::tuple(-keep_score(node.score, node.depth, problem_.recipe.depth_bonus), i);
    };
    std::ranges::sort(order, {}, rank);
    if (static_cast<int>(order.size()) > problem_.budget) order.resize(problem_.budget);
    order.push_back(0);
    std::ranges::sort(order);
    std::vector<Node> kept;
    for (const int i : order) {
      kept.push_back(nodes_[i]);
      if (i > 0) {
        kept.back().parent =
            static_cast<int32_t>(std::ranges::find(order, nodes_[i].parent) - order.begin());
      }
    }
    return kept;
  }

 private:
  std::vector<int> step(const std::vector<int>& frontier, int quota) {
    std::vector<Node> children;
    for (const int parent : frontier) {
      for (int rank = 0; rank < problem_.count; ++rank) {
        const size_t at = (request_ * problem_.levels + level_) * problem_.count + rank;
        if (problem_.log_prob[at] == kUnused) continue;
        const float score =
            nodes_[parent].score + problem_.recipe.level_weight[level_] * problem_.log_prob[at];
        children.push_back({static_cast<int32_t>(problem_.token[at]), parent, level_ + 1, score});
      }
    }
    std::vector<int> order(children.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int>(i);
    std::ranges::stable_sort(order, {}, [&](int i) {
      const int64_t* end = &problem_.end[request_ * 2];
      const bool ends = children[i].token == end[0] || children[i].token == end[1];
      return std::tuple(ends && problem_.recipe.ends_last, -children[i].score);
    });
    if (static_cast<int>(order.size()) > quota) order.resize(quota);
    std::vector<int> next;
    const int first = static_cast<int>(nodes_.size());
    if (problem_.recipe.every_child) {
      nodes_.insert(nodes_.end(), children.begin(), children.end());
      for (const int i : order) next.push_back(first + i);
    } else {
      for (const int i : order) {
        next.push_back(static_cast<int>(nodes_.size()));
        nodes_.push_back(children[i]);
      }
    }
    return next;
  }

  const Problem& problem_;
  const int request_;
  int level_ = 0;
  int share_ = 1;
  std::vector<Node> nodes_;
};

struct Trees {
  Trees(int requests, int width)
      : width(width),
        token(requests * width),
        position(token),
        child(token),
        sibling(token),
        parent(requests * width),
        depth(parent),
        score(requests * width),
        length(requests, 7),
        mask(requests * width * width),
        bits(requests * width * mask_words(width)) {}

  TreeBatch batch() {
    return {width, token, parent, depth, score, length, position, child, sibling, mask, bits};
  }

  int width;
  std::vector<int64_t> token, position, child, sibling;
  std::vector<int32_t> parent, depth;
  std::vector<float> score;
  std::vector<int64_t> length;
  std::vector<uint8_t> mask;
  std::vector<uint64_t> bits;
};

void check(bool condition, const char* what, int seed) {
  if (condition) return;
  std::fprintf(stderr, "seed %d: %s\n", seed, what);
  std::exit(1);
}

void check_trees(const Problem& problem, const Trees& trees, int seed) {
  for (int request = 0; request < problem.requests; ++request) {
    const std::vector<Node> kept = Definition(problem, request).kept();
    for (int i = 0; i < trees.width; ++i) {
      const bool used = i < static_cast<int>(kept.size());
      const Node node = used ? kept[i] : Node{0, -1, 0, kUnused};
      const int at = request * trees.width + i;
      check(trees.token[at] == node.token && trees.parent[at] == node.parent &&
                trees.depth[at] == node.depth && trees.score[at] == node.score,
            "a node differs from the definition", seed);
      check(trees.position[at] == 7 + node.depth, "a position is wrong", seed);
      int seen = 0;
      for (int j = 0; j < trees.width; ++j) {
        const bool bit = trees.bits[at * mask_words(trees.width) + j / 64] >> j % 64 & 1;
        check(bit == (trees.mask[at * trees.width + j] == 1), "mask and mask bits differ", seed);
        seen += bit;
      }
      check(seen == node.depth + 1, "a row sees other nodes than its path", seed);
    }
  }
}

// The same children under every path, handed over level by level.
void grow_staged(StagedGrower& grower, const Problem& problem, const RequestBatch& requests,
                 const TreeBatch& trees) {
  grower.start(problem.recipe, requests, problem.budget);
  for (int level = 0; grower.width() > 0; ++level) {
    std::vector<int64_t> token;
    std::vector<float> step;
    for (int request = 0; request < problem.requests; ++request) {
      for (int path = 0; path < grower.width(); ++path) {
        const size_t at = (request * problem.levels + level) * problem.count;
        token.insert(token.end(), &problem.token[at], &problem.token[at] + problem.count);
        step.insert(step.end(), &problem.log_prob[at], &problem.log_prob[at] + problem.count);
      }
    }
    grower.extend(token, step, problem.count);
  }
  grower.finish(trees);
}

}  // namespace
}  // namespace dart

int main() {
  using namespace dart;
  ThreadPool pool(3);
  StagedGrower staged(pool, {});
  for (int seed = 0; seed < 1000; ++seed) {
    std::mt19937 random(seed);
    const Problem problem = random_problem(random);
    const RequestBatch requests{problem.requests, problem.root, problem.end, {}};
    const CandidateBatch candidates{problem.levels, problem.count, problem.token, problem.log_prob};
    Trees trees(problem.requests, problem.budget + 1);
    Grower grower(pool, std::vector<float>(problem.levels, 1.0f), {});
    grower.grow(problem.recipe, requests, candidates, trees.batch());
    check_trees(problem, trees, seed);
    grow_staged(staged, problem, requests, trees.batch());
    check_trees(problem, trees, seed);
  }
}
