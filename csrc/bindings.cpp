// Python bindings over pointers, sizes, dtype enums and a stream; no framework. The Python side checks and allocates.
//
// An op takes (library, …, stream): library 0 = CPU (stream = number of threads), 1 = CUDA (stream = cudaStream_t as an
// integer). The arguments between them are read in order, each as the type of the field that receives it: a View is
// None or (pointer, elements between samples, dtype enum); a pointer is an integer, 0 if absent.
// Invariant: only CPython's stable ABI is used, so that one binary works with every Python from 3.10.
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include <new>
#include <stdexcept>
#include <string>

#include "cpu.h"
#if defined(PG_CUDA)
#include "cuda.h"
#endif

using namespace prefgrpo;

namespace {

struct PythonError {};  // the interpreter holds the exception

// The arguments of a call, or the items of a tuple among them.
class Arguments {
 public:
  Arguments(PyObject* const* given, Py_ssize_t size) : given_(given), size_(size) {}
  explicit Arguments(PyObject* tuple) : tuple_(tuple), size_(PyTuple_Check(tuple) ? PyTuple_Size(tuple) : -1) {
    if (size_ < 0) throw std::invalid_argument("expected a tuple");
  }

  template <class T>
  Arguments& operator>>(T& field) {
    read(next(), field);
    return *this;
  }

  Arguments nested() { return Arguments(next()); }
  void end() const {
    if (at_ != size_) throw std::invalid_argument("expected " + std::to_string(at_) + " arguments");
  }

 private:
  PyObject* next() {
    if (at_ == size_) throw std::invalid_argument("expected more than " + std::to_string(size_) + " arguments");
    const Py_ssize_t k = at_++;
    return tuple_ ? PyTuple_GetItem(tuple_, k) : given_[k];
  }

  static void read(PyObject* o, int64_t& field) {
    field = PyLong_AsLongLong(o);
    if (field == -1 && PyErr_Occurred()) throw PythonError();
  }
  static void read(PyObject* o, int32_t& field) {
    int64_t wide;
    read(o, wide);
    field = static_cast<int32_t>(wide);
  }
  static void read(PyObject* o, double& field) {
    field = PyFloat_AsDouble(o);
    if (field == -1.0 && PyErr_Occurred()) throw PythonError();
  }
  static void read(PyObject* o, float& field) {
    double wide;
    read(o, wide);
    field = static_cast<float>(wide);
  }
  template <class T>
  static void read(PyObject* o, T*& field) {
    int64_t address;
    read(o, address);
    field = reinterpret_cast<T*>(address);
  }
  static void read(PyObject* o, View& field) {
    if (o != Py_None) Arguments(o) >> field.data >> field.stride >> field.dtype;
  }
  static void read(PyObject* o, NoiseAddress& field) {  // (seed, sample pointer, step pointer, offset) or None
    if (o == Py_None) return;
    Arguments in(o);
    field.seed = PyLong_AsUnsignedLongLongMask(in.next());
    in >> field.sample >> field.step >> field.offset;
  }

  PyObject* const* given_ = nullptr;
  PyObject* tuple_ = nullptr;
  Py_ssize_t size_, at_ = 0;
};

// Runs `body` and returns None, or sets the Python exception for what it throws and returns null.
template <class Body>
PyObject* guarded(Body body) {
  try {
    body();
    Py_INCREF(Py_None);
    return Py_None;
  } catch (const PythonError&) {
  } catch (const std::invalid_argument& error) {
    PyErr_SetString(PyExc_TypeError, error.what());
  } catch (const std::out_of_range& error) {
    PyErr_SetString(PyExc_IndexError, error.what());
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

struct WithoutGil {
  PyThreadState* state = PyEval_SaveThread();
  ~WithoutGil() { PyEval_RestoreThread(state); }
};

void set_threads(AffineParams& p, int64_t n) { p.threads = static_cast<int32_t>(n); }
void set_threads(NormalParams& p, int64_t n) { p.threads = static_cast<int32_t>(n); }
template <class Params>
void set_threads(Params&, int64_t) {}  // the small ops run on one thread

// An op whose arguments `read` puts into Params; the first argument chooses CPU or CUDA. The CPU runs without the GIL.
template <class Params, void (*read)(Arguments&, Params&), void (*cpu_launch)(const Params&, void*),
          const char* (*cuda_launch)(const Params&, void*)>
PyObject* op(PyObject*, PyObject* const* given, Py_ssize_t size) {
  return guarded([=] {
    Arguments in(given, size);
    int64_t library, stream;
    Params p;
    in >> library;
    read(in, p);
    in >> stream;
    in.end();
    if (library == 0) {
      set_threads(p, stream);
      WithoutGil unlocked;
      cpu_launch(p, nullptr);
    } else if (const char* error = cuda_launch(p, reinterpret_cast<void*>(stream))) {
      throw std::runtime_error(std::string("CUDA launch failed: ") + error);
    }
  });
}

// The guidance options, a nested tuple of three.
void read_guidance(Arguments in, AffineParams& p) { in >> p.guidance >> p.from_cond >> p.rescale_dim; }

// The leading arguments of all affine ops.
Arguments& read_affine(Arguments& in, AffineParams& p) {
  in >> p.batch >> p.dim >> p.x >> p.v >> p.u;
  read_guidance(in.nested(), p);
  return in >> p.coef >> p.rows >> p.index;
}
void read_step(Arguments& in, AffineParams& p) {
  read_affine(in, p) >> p.out >> p.eps >> p.noise >> p.mean >> p.logp >> p.partial;
}
void read_logp(Arguments& in, AffineParams& p) {
  read_affine(in, p) >> p.out >> p.v_ref >> p.v_old >> p.logp >> p.kl >> p.guard >> p.partial;
}
void read_grad(Arguments& in, AffineParams& p) {
  read_affine(in, p) >> p.out >> p.v_ref >> p.v_old >> p.g_logp >> p.g_kl >> p.g_guard >> p.dv >> p.du;
}
void read_normal(Arguments& in, NormalParams& p) { in >> p.batch >> p.dim >> p.noise >> p.out; }
void read_policy(Arguments& in, PolicyParams& p) {
  in >> p.batch >> p.logp >> p.logp_old >> p.advantage >> p.weight >> p.kl >> p.log_ratio >> p.clip_low >>
      p.clip_high >> p.adv_clip >> p.kl_coef >> p.denominator >> p.loss >> p.metrics >> p.d_delta >> p.d_kl;
}
void read_winrate(Arguments& in, WinrateParams& p) {
  in >> p.prompts >> p.group >> p.wins >> p.counts >> p.dtype >> p.use_std >> p.eps >> p.ddof >> p.rate >> p.advantage;
}

PyObject* isa(PyObject*, PyObject*) { return PyUnicode_FromString(cpu::isa()); }
PyObject* use_isa(PyObject*, PyObject* name) {
  const char* text = PyUnicode_AsUTF8AndSize(name, nullptr);
  return text ? PyBool_FromLong(cpu::use_isa(text)) : nullptr;
}

#if defined(PG_CUDA)
#define PG_LAUNCHES(name) cpu::launch_##name, cuda::launch_##name
constexpr char kCudaArchs[] = PG_CUDA;

// The guided velocity in fp32 or, if dv is given, its gradients in c and u.
void read_guide(Arguments& in, AffineParams& p) {
  in >> p.batch >> p.dim >> p.v >> p.u;
  read_guidance(in.nested(), p);
  in >> p.eps >> p.out >> p.du;
  p.dv = p.out;
}
void guide_on_cpu(const AffineParams&, void*) { throw std::runtime_error("the CPU kernels restore norms themselves"); }
const char* guide(const AffineParams& p, void* stream) {
  return p.eps.data ? cuda::launch_guide_grad(p, stream) : cuda::launch_guide(p, stream);
}

PyObject* partials(PyObject*, PyObject* dim) {
  const int64_t n = PyLong_AsLongLong(dim);
  return PyErr_Occurred() ? nullptr : PyLong_FromLongLong(cuda::partials_of(n));
}
PyObject* fuses_norm(PyObject*, PyObject* rescale_dim) {
  const int64_t n = PyLong_AsLongLong(rescale_dim);
  return PyErr_Occurred() ? nullptr : PyBool_FromLong(cuda::fuses_norm(n));
}
#else
#define PG_LAUNCHES(name) cpu::launch_##name, no_cuda
constexpr char kCudaArchs[] = "";

template <class Params>
const char* no_cuda(const Params&, void*) {
  throw std::runtime_error("this build has no CUDA kernels; rebuild where nvcc is found");
}
#endif

PyCFunction method(PyObject* (*f)(PyObject*, PyObject* const*, Py_ssize_t)) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(f));
}

PyMethodDef methods[] = {
    {"affine_step", method(op<AffineParams, read_step, PG_LAUNCHES(affine_step)>), METH_FASTCALL, nullptr},
    {"affine_logp", method(op<AffineParams, read_logp, PG_LAUNCHES(affine_logp)>), METH_FASTCALL, nullptr},
    {"affine_grad", method(op<AffineParams, read_grad, PG_LAUNCHES(affine_grad)>), METH_FASTCALL, nullptr},
    {"normal", method(op<NormalParams, read_normal, PG_LAUNCHES(normal)>), METH_FASTCALL, nullptr},
    {"policy", method(op<PolicyParams, read_policy, PG_LAUNCHES(policy)>), METH_FASTCALL, nullptr},
    {"winrate_advantage", method(op<WinrateParams, read_winrate, PG_LAUNCHES(winrate)>), METH_FASTCALL, nullptr},
#if defined(PG_CUDA)
    {"guide", method(op<AffineParams, read_guide, guide_on_cpu, guide>), METH_FASTCALL, nullptr},
    {"partials", partials, METH_O, "CUDA scratch doubles per sample and plane"},
    {"fuses_norm", fuses_norm, METH_O, "whether the CUDA kernels restore a norm over so many elements themselves"},
#endif
    {"isa", isa, METH_NOARGS, "instruction set of the CPU kernels in use"},
    {"use_isa", use_isa, METH_O, "choose plain, avx2 or avx512; False if unavailable"},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_C",
                          "prefgrpo's compiled kernels over raw pointers; use prefgrpo.ops", -1, methods};

}  // namespace

PyMODINIT_FUNC PyInit__C() {
  PyObject* module = PyModule_Create(&definition);
  if (module && !PyModule_AddStringConstant(module, "cuda_archs", kCudaArchs) &&
      !PyModule_AddIntConstant(module, "max_rescale_dim", kMaxRescaleDim))
    return module;
  Py_XDECREF(module);
  return nullptr;
}
