// Table of contents of sglang_dart._core: one bind_*() per header of core/.
#include "bind/bind.h"

NB_MODULE(_core, m) {
  m.doc() = "Draft-tree search on the CPU.";
  dart::bind_thread_pool(m);
}
