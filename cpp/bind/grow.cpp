// core/grow.h and batch.h: growth of a batch of trees.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "bind/bind.h"
#include "bind/tree.h"
#include "core/batch.h"
#include "core/grow.h"

#include <nanobind/stl/vector.h>

namespace nb = nanobind;
using namespace nb::literals;

namespace dart {
namespace {

using Tokens = Array<const int64_t, 1>;
using TokenRows = std::optional<Array<const int64_t, 2>>;

ContinuityChoice choose_continuity(const NgramModel* ngram, float weight, float epsilon,
                                   int first_level) {
  DART_CHECK(weight >= 0 && std::isfinite(weight), "ngram_weight must be 0 or more, got ", weight);
  DART_CHECK(epsilon > 0 && std::isfinite(epsilon), "ngram_epsilon must be above 0, got ", epsilon);
  DART_CHECK(first_level >= 0, "ngram_first_level must be 0 or more, got ", first_level);
  // Without weight the model adds nothing.
  return {weight > 0 ? ngram : nullptr, {weight, epsilon, first_level}};
}

RequestBatch request_batch(int64_t requests, const Tokens& root, const TokenRows& end,
                           const TokenRows& tail, bool needs_tail) {
  check_shape(root, "root", {requests});
  for (const int64_t token : span_of(root)) {
    DART_CHECK(token >= 0 && token <= std::numeric_limits<int32_t>::max(), "root token ", token,
               " is outside [0, 2^31)");
  }
  check_shape(end, "end", {requests, -1});
  check_shape(tail, "tail", {requests, -1});
  DART_CHECK(!needs_tail || tail, "the n-gram model needs `tail`, the newest tokens");
  return {static_cast<int>(requests), span_of(root), span_of(end), span_of(tail)};
}

void check_ledger(const Recipe& recipe, int64_t budget, int64_t count) {
  const int64_t frontier = std::max<int64_t>(recipe.frontier, budget), levels = recipe.levels();
  DART_CHECK(frontier * levels * count <= kMaxLedger, "a ledger of ", frontier, " paths, ", count,
             " candidates, ", levels, " levels is too large; the limit is ", kMaxLedger, " nodes");
}

void check_logit_weight(const std::vector<float>& logit_weight) {
  for (const float weight : logit_weight) {
    DART_CHECK(weight > 0 && std::isfinite(weight), "logit_weight must be above 0, got ", weight);
  }
}

void grow(Grower& grower, const Recipe& recipe, const Tokens& root,
          const Array<const int64_t, 3>& token, const Array<const float, 3>& log_prob,
          const TreeArrays& trees, const TokenRows& end, const TokenRows& tail,
          const std::optional<Lengths>& length) {
  const int64_t requests = trees.requests();
  const auto levels = static_cast<int64_t>(token.shape(1));
  const auto count = static_cast<int64_t>(token.shape(2));
  check_shape(token, "token", {requests, levels, count});
  check_shape(log_prob, "log_prob", {requests, levels, count});
  DART_CHECK(levels <= grower.levels() && levels == recipe.levels(), "candidates have ", levels,
             " levels, the recipe ", recipe.levels(), ", logit_weight ", grower.levels());
  check_ledger(recipe, trees.width() - 1, count);
  const RequestBatch batch = request_batch(requests, root, end, tail, grower.uses_ngram());
  const CandidateBatch candidates{static_cast<int>(levels), static_cast<int>(count), span_of(token),
                                  span_of(log_prob)};
  const TreeBatch out = trees.batch(length);
  nb::gil_scoped_release release;
  grower.grow(recipe, batch, candidates, out);
}

void start(StagedGrower& grower, const Recipe& recipe, int budget, const Tokens& root,
           const TokenRows& end, const TokenRows& tail) {
  DART_CHECK(budget >= 1 && budget < TreeArrays::kMaxWidth, "budget must be 1 to ",
             TreeArrays::kMaxWidth - 1, ", got ", budget);
  const auto requests = static_cast<int64_t>(root.shape(0));
  const RequestBatch batch = request_batch(requests, root, end, tail, grower.uses_ngram());
  nb::gil_scoped_release release;
  grower.start(recipe, batch, budget);
}

void frontier(const StagedGrower& grower, const Array<int64_t, 2>& token,
              const Array<int64_t, 2>& origin, const Array<int64_t, 1>& count) {
  check_shape(token, "token", {grower.size(), grower.width()});
  check_shape(origin, "origin", {grower.size(), grower.width()});
  check_shape(count, "count", {grower.size()});
  grower.frontier(span_of(token), span_of(origin), span_of(count));
}

void extend(StagedGrower& grower, const Array<const int64_t, 3>& token,
            const Array<const float, 3>& step) {
  const auto count = static_cast<int64_t>(token.shape(2));
  check_shape(token, "token", {grower.size(), grower.width(), count});
  check_shape(step, "step", {grower.size(), grower.width(), count});
  check_ledger(grower.recipe(), grower.budget(), count);
  nb::gil_scoped_release release;
  grower.extend(span_of(token), span_of(step), static_cast<int>(count));
}

void finish(StagedGrower& grower, const TreeArrays& trees, const std::optional<Lengths>& length) {
  DART_CHECK(trees.requests() == grower.size() && trees.width() == grower.budget() + 1,
             "trees are [", trees.requests(), ", ", trees.width(), "], expected [", grower.size(),
             ", ", grower.budget() + 1, "]");
  const TreeBatch out = trees.batch(length);
  nb::gil_scoped_release release;
  grower.finish(out);
}

}  // namespace

void bind_grow(nb::module_& m) {
  nb::class_<Recipe>(m, "Recipe", "Which paths are extended, and which nodes may be kept.")
      .def(
          "__init__",
          [](Recipe* self, int frontier, bool every_child, bool ends_last, float depth_bonus,
             std::vector<float> level_weight) {
            Recipe recipe{frontier, every_child, ends_last, depth_bonus, std::move(level_weight)};
            check_recipe(recipe);
            new (self) Recipe(std::move(recipe));
          },
          "frontier"_a, "every_child"_a, "ends_last"_a, "depth_bonus"_a, "level_weight"_a,
          "frontier: paths extended at each level; 0 takes an equal share of the budget left.\n"
          "every_child: every scored child enters the ledger, not only those extended next.\n"
          "ends_last: paths that end the answer are extended only where others leave room.\n"
          "depth_bonus: added to a node's score for each level when nodes are kept; <= 0.\n"
          "level_weight: what a step at each level counts; one number a level.");

  nb::class_<Grower>(m, "Grower",
                     "Grows trees whose scores depend on level, candidate and continuity only.")
      .def(
          "__init__",
          [](Grower* self, ThreadPool& pool, const std::vector<float>& logit_weight,
             const NgramModel* ngram, float ngram_weight, float ngram_epsilon,
             int ngram_first_level) {
            check_logit_weight(logit_weight);
            new (self)
                Grower(pool, logit_weight,
                       choose_continuity(ngram, ngram_weight, ngram_epsilon, ngram_first_level));
          },
          "pool"_a, "logit_weight"_a, "ngram"_a = nb::none(), "ngram_weight"_a = 0.5f,
          "ngram_epsilon"_a = 1e-10f, "ngram_first_level"_a = 1, nb::keep_alive<1, 2>(),
          nb::keep_alive<1, 4>(),
          "A step of level l scores logit_weight[l] * log_prob + n, where n is\n"
          "ngram_weight * ln(P + ngram_epsilon) from level ngram_first_level on, else 0.")
      .def("grow", &grow, "recipe"_a, "root"_a, "token"_a, "log_prob"_a, "trees"_a,
           "end"_a = nb::none(), "tail"_a = nb::none(), "length"_a = nb::none(),
           "Grow, keep, write and pack a tree for each request.\n\n"
           "root [bs] int64; token [bs, D, K] int64, log_prob [bs, D, K] float32, -inf = unused;\n"
           "end [bs, E] int64: tokens that end the answer, -1 fills up;\n"
           "tail [bs, T] int64: newest committed tokens, root last, -1 where there are fewer;\n"
           "length [bs] int64: committed tokens before the root.");

  nb::class_<StagedGrower>(m, "StagedGrower",
                           "Grows trees whose scores depend on the path; the caller scores them.")
      .def(
          "__init__",
          [](StagedGrower* self, ThreadPool& pool, const NgramModel* ngram, float ngram_weight,
             float ngram_epsilon, int ngram_first_level) {
            new (self) StagedGrower(
                pool, choose_continuity(ngram, ngram_weight, ngram_epsilon, ngram_first_level));
          },
          "pool"_a, "ngram"_a = nb::none(), "ngram_weight"_a = 0.5f, "ngram_epsilon"_a = 1e-10f,
          "ngram_first_level"_a = 1, nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>())
      .def("start", &start, "recipe"_a, "budget"_a, "root"_a, "end"_a = nb::none(),
           "tail"_a = nb::none(), "Begin a tree for each root; see Grower.grow.")
      .def_prop_ro("size", &StagedGrower::size, "Requests of the batch.")
      .def_prop_ro("width", &StagedGrower::width,
                   "Paths of the widest frontier; 0 once every tree is grown.")
      .def("frontier", &frontier, "token"_a.noconvert(), "origin"_a.noconvert(),
           "count"_a.noconvert(),
           "Write the frontier: token, origin [bs, width] int64, count [bs] int64.\n\n"
           "token: each path's last token; origin: position of its parent in the frontier before;\n"
           "count: how many paths a request has, best first; 0 fills up.")
      .def("extend", &extend, "token"_a, "step"_a,
           "Score the frontier's children: token [bs, width, K] int64, step [bs, width, K]\n"
           "float32, the score of the step, -inf = unused; above 0 counts as 0.")
      .def("finish", &finish, "trees"_a, "length"_a = nb::none(), "Write and pack the trees.");
}

}  // namespace dart
