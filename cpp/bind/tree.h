// The output arrays that the bindings of grow, prune and pack share.
#pragma once

#include <optional>

#include "bind/arrays.h"
#include "core/batch.h"

namespace dart {

using Lengths = Array<const int64_t, 1>;

// Holds references to the caller's arrays; their shapes have been checked.
class TreeArrays {
 public:
  // Bounds the square mask of a request at 64 MiB.
  static constexpr int64_t kMaxWidth = 8192;

  TreeArrays(Array<int64_t, 2> token, Array<int32_t, 2> parent, Array<int32_t, 2> depth,
             Array<float, 2> score, std::optional<Array<int64_t, 2>> position,
             std::optional<Array<int64_t, 2>> first_child,
             std::optional<Array<int64_t, 2>> next_sibling, std::optional<Array<bool, 3>> mask,
             std::optional<Array<uint64_t, 3>> mask_bits);

  int64_t requests() const { return static_cast<int64_t>(token_.shape(0)); }
  int64_t width() const { return static_cast<int64_t>(token_.shape(1)); }

  // Throws std::invalid_argument if `length` is missing or of another batch.
  TreeBatch batch(const std::optional<Lengths>& length) const;

 private:
  Array<int64_t, 2> token_;
  Array<int32_t, 2> parent_, depth_;
  Array<float, 2> score_;
  std::optional<Array<int64_t, 2>> position_, first_child_, next_sibling_;
  std::optional<Array<bool, 3>> mask_;
  std::optional<Array<uint64_t, 3>> mask_bits_;
};

}  // namespace dart
