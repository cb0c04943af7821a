// The Python module of the ops in cpu/host_ops.h. Importing it also registers the ops of bindings.cpp with torch.
#include <torch/csrc/utils/pybind.h>

#include "cpu/host_ops.h"

namespace py = pybind11;

PYBIND11_MODULE(_native, m) {
  using namespace sglang_dflash;
  py::register_local_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const c10::Error& error) {
      PyErr_SetString(PyExc_RuntimeError, error.what_without_backtrace());
    }
  });
  const py::call_guard<py::gil_scoped_release> others_run;  // other Python threads run during the long ops
  m.attr("SOURCES") = SOURCES;  // their digest, from ops/build_native.py
  m.def("block_layout", block_layout);
  m.def("write_context_kv", write_context_kv, others_run);
  m.def("platt", platt);
  m.def("best_first", best_first);
  m.def("take_rows", take_rows);
  m.def("plan_rows", plan_rows);
  m.def("learn_steps", learn_steps);
  m.def("best_width", best_width);
  m.def("top_log_probs", top_log_probs, others_run);
  m.def("accept_tree", accept_tree);
  m.def("accept_tree_greedy", accept_tree_greedy, others_run);
  m.def("lay_out_trees", lay_out_trees);
  m.def("exchange_slots", exchange_slots);
  m.def("committed_rows", committed_rows);
}
