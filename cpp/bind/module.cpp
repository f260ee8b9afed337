// Table of contents of sglang_dart._core: one bind_*() per header of core/.
#include "bind/bind.h"

NB_MODULE(_core, m) {
  m.doc() = "Draft-tree search on the CPU.";
  dart::bind_ngram(m);
  dart::bind_thread_pool(m);
  dart::bind_tree(m);
  dart::bind_grow(m);
}
