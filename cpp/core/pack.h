// Tree -> positions, child and sibling links, visibility mask.
#pragma once

#include <cstdint>
#include <span>

#include "core/tree.h"

namespace dart {

// Packs one request's tree of N nodes. `length` committed positions stand before the root.
// Children are linked in node order; padding (parent -1) is linked from nowhere and sees itself.
// Throws std::invalid_argument unless every parent is -1 or an earlier node.
void pack(std::span<const int32_t> parent, std::span<const int32_t> depth, int64_t length,
          const PackedSpan& packed);

}  // namespace dart
