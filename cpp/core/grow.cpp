#include "core/grow.h"

#include <algorithm>
#include <cmath>

#include "support/check.h"

namespace dart {

void check_recipe(const Recipe& recipe) {
  DART_CHECK(recipe.frontier >= 0, "frontier must be 0 or more, got ", recipe.frontier);
  DART_CHECK(recipe.frontier > 0 || !recipe.every_child,
             "frontier 0 shares the budget out, so only extended children may enter; "
             "set every_child to false or give a frontier");
  DART_CHECK(recipe.depth_bonus <= 0 && std::isfinite(recipe.depth_bonus),
             "depth_bonus must be 0 or less, got ", recipe.depth_bonus,
             "; above 0 a node could outrank its parent");
  DART_CHECK(!recipe.level_weight.empty(), "level_weight holds one number a level, got none");
  for (const float weight : recipe.level_weight) {
    DART_CHECK(weight >= 0 && std::isfinite(weight), "level_weight must be 0 or more, got ",
               weight);
  }
}

void Growth::start(const Recipe& recipe, int budget, int32_t root_token, bool shared) {
  recipe_ = &recipe;
  budget_ = budget;
  level_ = 0;
  drops_ = shared || !recipe.ends_last;
  full_frontier_ = 1;
  share_ = 1;
  taken_ = 0;
  nodes_.assign(1, Node{root_token, -1, 0, 0.0f});
  frontier_.clear();
  if (budget > 0) frontier_.push_back({0, 0});
  kept_.reset(budget);
}

// Paths that the next frontier may have.
int Growth::take_quota(int count) {
  if (recipe_->frontier > 0) return recipe_->frontier;
  const int left = budget_ - taken_, levels = recipe_->levels() - level_;
  const int64_t quota = (left + levels - 1) / levels;
  share_ = static_cast<int>(std::min(quota, static_cast<int64_t>(share_) * count));
  taken_ += share_;
  return share_;
}

void Growth::extend(const Children& children, Continuity* continuity) {
  const int width = take_quota(children.count);
  if (width == 0) {
    frontier_.clear();
    return;
  }
  extended_.reset(width);
  level_begin_ = nodes_.size();
  origin_.clear();
  for (size_t position = 0; position < frontier_.size(); ++position) {
    score_children(static_cast<int>(position), children, continuity);
  }

  // Children counted as if nothing had been left out: that is what fills the next frontier.
  int64_t others = 0, ends = 0;
  for (size_t flat = 0; flat < children.step.size(); ++flat) {
    if (children.step[flat] > kUnused) ++(children.end[flat] ? ends : others);
  }
  if (children.shared) others *= full_frontier_, ends *= full_frontier_;
  full_frontier_ = std::min<int64_t>(width, others + ends);
  choose_frontier(children, full_frontier_ - std::min<int64_t>(width, others));
  if (++level_ == recipe_->levels()) frontier_.clear();
  if (continuity) continuity->advance(frontier_, nodes_);
}

void Growth::score_children(int position, const Children& children, Continuity* continuity) {
  // A copy: nodes_ may move while children enter.
  const Node parent = nodes_[frontier_[position].node];
  const int first = children.shared ? 0 : position * children.count;
  const int flat = position * children.count;
  const float weight = recipe_->level_weight[level_];
  int count = children.count;
  std::span<const float> added;
  if (continuity && continuity->applies_at(level_)) {
    count = count_promising(parent, flat, children);
    if (count == 0) return;
    added = continuity->score(position, children.token.subspan(first, count));
  }
  for (int rank = 0; rank < count; ++rank) {
    float step = children.step[first + rank];
    if (!(step > kUnused)) continue;
    if (!added.empty()) step += added[rank];
    const float score = std::min(parent.score, parent.score + weight * step);
    const bool end = children.end[first + rank];
    if (may_enter(score, flat + rank, end)) {
      enter(score, flat + rank, end, position, children.token[first + rank]);
    } else if (children.sorted && added.empty() && !end) {
      break;
    }
  }
}

int Growth::count_promising(const Node& parent, int flat, const Children& children) const {
  if (!children.sorted) return children.count;
  const int first = children.shared ? 0 : flat;
  const float weight = recipe_->level_weight[level_];
  int count = 0;
  for (int rank = 0; rank < children.count; ++rank) {
    const float step = children.step[first + rank];
    if (!(step > kUnused)) break;
    const bool end = children.end[first + rank];
    const float most = std::min(parent.score, parent.score + weight * step);
    if (may_enter(most, flat + rank, end)) {
      count = rank + 1;
    } else if (!end) {
      break;
    }
  }
  return count;
}

// Whether a child can still be kept, and, where only extended ones enter, extended.
bool Growth::may_enter(float score, int flat, bool end) const {
  // Finite steps may still sum up to -inf.
  if (!(score > kUnused)) return false;
  if (drops_ && keep_rank(score, nodes_.size()) <= kept_.floor()) return false;
  return recipe_->every_child || extend_rank(score, flat, end) > extended_.floor();
}

void Growth::enter(float score, int flat, bool end, int position, int32_t token) {
  if (!recipe_->every_child) {
    extended_.offer(extend_rank(score, flat, end));
    return;
  }
  kept_.offer(keep_rank(score, nodes_.size()));
  extended_.offer(extend_rank(score, nodes_.size(), end));
  nodes_.push_back(Node{token, frontier_[position].node, level_ + 1, score});
  origin_.push_back(position);
}

void Growth::choose_frontier(const Children& children, int64_t most_ends) {
  std::swap(frontier_, last_frontier_);
  frontier_.clear();
  for (const NodeRank rank : extended_.sort_best_first()) {
    if (rank_is_last(rank) && most_ends-- == 0) break;
    const float score = rank_score(rank);
    const auto index = static_cast<int32_t>(rank_index(rank));
    if (recipe_->every_child) {
      // Others may have put it out of reach since it entered.
      if (drops_ && keep_rank(score, index) < kept_.floor()) continue;
      frontier_.push_back({index, origin_[index - level_begin_]});
      continue;
    }
    const auto node = static_cast<int32_t>(nodes_.size());
    if (!kept_.offer(keep_rank(score, node)) && drops_) continue;
    const int position = index / children.count;
    nodes_.push_back(Node{children.token[children.shared ? index % children.count : index],
                          last_frontier_[position].node, level_ + 1, score});
    frontier_.push_back({node, position});
  }
}

void Growth::finish(const TreeSpan& tree) {
  TreeWriter writer(tree, nodes_[0].token, nodes_.size(), place_);
  for (const NodeRank rank : kept_.sort_by_index()) {
    const uint32_t index = rank_index(rank);
    const Node& node = nodes_[index];
    writer.add(index, node.token, node.parent, node.depth, node.score);
  }
  writer.pad();
}

}  // namespace dart
