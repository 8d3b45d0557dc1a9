// Whether what a call depends on is as it was: the fast checks of `ModuleWatch` and of arguments.
//
// A Check is made of what `watch._Compared` holds, and Arguments of a call that a graph was
// captured for. They may say that something changed where nothing did, and never the other way round.
// Dictionaries tell that they were written to by their version tags
// (CPython 3.11) or by watchers (3.12 and later); neither is in the stable interface, so that
// `compiled_checks.py` tries both out before it uses them. An OrderedDict counts the changes of its
// order, which `dictionaries.py` has tried out where it is one of the dictionaries.

#include <Python.h>

#include <ATen/PythonTorchFunctionTLS.h>
#include <c10/core/GradMode.h>
#include <c10/core/SafePyObject.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/Export.h>
#include <torch/csrc/autograd/forward_grad.h>

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

// These two are declared in torch/csrc/autograd/python_variable.h, which takes three times as long to
// compile as all else here. `compiled_checks.py` asks `graphwright_knows_tensor` before it uses them.
TORCH_PYTHON_API extern PyObject* THPVariableClass;

namespace {

struct Tensor {
  PyObject_HEAD
  c10::TensorImpl* impl;
};

c10::TensorImpl* impl_of(PyObject* tensor) { return reinterpret_cast<Tensor*>(tensor)->impl; }

bool is_tensor(PyObject* object) {
  const int found = PyObject_IsInstance(object, THPVariableClass);
  if (found < 0) PyErr_Clear();
  return found == 1;
}

struct Check;

// Which checks look at a dictionary.
std::unordered_map<PyObject*, std::vector<Check*>> watching;

// What is known of a tensor. It points to the parts itself, so that the processor can load those of
// one tensor at the same time, and those of several.
struct TensorFacts {
  PyObject* object;
  const c10::TensorImpl* impl;
  const c10::StorageImpl* storage;
  const void* address;  // of the storage
  int64_t offset;       // in it, in elements
  c10::ScalarType dtype;
  c10::DispatchKeySet keys;
  int64_t version;  // -1 where it does not matter
  size_t begin;     // of its sizes and strides
  size_t dimensions;
};

struct Getter {
  PyObject* get;
  PyObject* of;
  size_t begin;  // of the values that it gave
  size_t count;
};

struct Check {
  PyObject_HEAD
  std::vector<PyObject*> held;  // owned references to all that is pointed to
  std::vector<std::pair<PyObject**, PyObject*>> owners;  // where each has its dictionary
  std::vector<std::pair<PyObject*, uint64_t>> dictionaries;
  std::vector<std::pair<const size_t*, size_t>> orders;  // where each is counted
  std::vector<PyObject*> empty;
  std::vector<std::pair<PyObject*, PyTypeObject*>> typed;
  std::vector<std::pair<PyObject*, PyObject*>> classes;
  std::vector<std::pair<PyObject*, Py_ssize_t>> lists;
  std::vector<PyObject*> items;
  std::vector<std::pair<PyObject*, Py_ssize_t>> longs;
  std::vector<Getter> getters;
  std::vector<PyObject*> values;
  std::vector<TensorFacts> tensors;
  std::vector<int64_t> geometry;
  PyObject* forward;
  bool written;
};

#if PY_VERSION_HEX >= 0x030C0000
int watcher = -1;

int on_write(PyDict_WatchEvent event, PyObject* dictionary, PyObject*, PyObject*) {
  auto found = watching.find(dictionary);
  if (found != watching.end())
    for (Check* check : found->second) check->written = true;
  return 0;
}

bool watch(Check* self, PyObject* dictionary) {
  if (PyDict_Watch(watcher, dictionary) < 0) return false;
  watching[dictionary].push_back(self);
  return true;
}

void unwatch(Check* self, PyObject* dictionary) {
  auto found = watching.find(dictionary);
  if (found == watching.end()) return;
  auto& checks = found->second;
  for (size_t n = checks.size(); n-- > 0;)
    if (checks[n] == self) checks.erase(checks.begin() + n);
  if (checks.empty()) {
    watching.erase(found);
    PyDict_Unwatch(watcher, dictionary);
  }
}
#else
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
uint64_t version_of(PyObject* dictionary) {
  return reinterpret_cast<PyDictObject*>(dictionary)->ma_version_tag;
}

bool watch(Check*, PyObject*) { return true; }
void unwatch(Check*, PyObject*) {}
#endif

bool is_empty(PyObject* object) {
  if (PyDict_Check(object)) return PyDict_GET_SIZE(object) == 0;
  const Py_ssize_t size = PyObject_Size(object);
  if (size < 0) PyErr_Clear();
  return size == 0;
}

bool same_items(PyObject* list, Py_ssize_t count, PyObject* const* items) {
  if (PyList_CheckExact(list) || PyTuple_CheckExact(list)) {
    if (PySequence_Fast_GET_SIZE(list) != count) return false;
    PyObject** now = PySequence_Fast_ITEMS(list);
    for (Py_ssize_t n = 0; n < count; ++n)
      if (now[n] != items[n]) return false;
    return true;
  }
  if (PyObject_Size(list) != count) return PyErr_Clear(), false;
  if (count == 0) return true;
  PyObject* iterator = PyObject_GetIter(list);
  if (iterator == nullptr) return PyErr_Clear(), false;
  bool same = true;
  for (Py_ssize_t n = 0; same; ++n) {
    PyObject* now = PyIter_Next(iterator);
    if (now == nullptr) {
      same = n == count && !PyErr_Occurred();
      break;
    }
    same = n < count && now == items[n];
    Py_DECREF(now);
  }
  Py_DECREF(iterator);
  PyErr_Clear();
  return same;
}

bool same_values(Check* self, const Getter& getter) {
  PyObject* now = PyObject_CallOneArg(getter.get, getter.of);
  if (now == nullptr) return PyErr_Clear(), false;
  const bool sized = PyTuple_CheckExact(now) || PyList_CheckExact(now);
  bool same = sized && PySequence_Fast_GET_SIZE(now) == static_cast<Py_ssize_t>(getter.count);
  for (size_t n = 0; same && n < getter.count; ++n)
    same = PySequence_Fast_GET_ITEM(now, n) == self->values[getter.begin + n];
  Py_DECREF(now);
  return same;
}

bool same_tensor(Check* self, const TensorFacts& known) {
  if (impl_of(known.object) != known.impl) return false;
  const c10::TensorImpl* impl = known.impl;
  if (impl->dtype().toScalarType() != known.dtype || !impl->has_storage()) return false;
  if (impl->key_set() != known.keys) return false;
  if (impl->unsafe_storage().unsafeGetStorageImpl() != known.storage) return false;
  const auto sizes = impl->sizes();
  const auto strides = impl->strides();
  if (sizes.size() != known.dimensions || impl->storage_offset() != known.offset) return false;
  const int64_t* expected = self->geometry.data() + known.begin;
  for (size_t n = 0; n < known.dimensions; ++n)
    if (sizes[n] != expected[n] || strides[n] != expected[known.dimensions + n]) return false;
  if (known.storage->data() != known.address) return false;
  return known.version < 0 || impl->version_counter().current_version() == known.version;
}

PyObject* check_call(PyObject* object, PyObject*, PyObject*) {
  Check* self = reinterpret_cast<Check*>(object);
  if (self->written) Py_RETURN_FALSE;
  try {
    for (auto& [place, dictionary] : self->owners)
      if (*place != dictionary) Py_RETURN_FALSE;
#if PY_VERSION_HEX < 0x030C0000
    for (auto& [dictionary, version] : self->dictionaries)
      if (version_of(dictionary) != version) Py_RETURN_FALSE;
#endif
    for (auto& [place, count] : self->orders)
      if (*place != count) Py_RETURN_FALSE;
    for (auto& [typed, type] : self->typed)
      if (Py_TYPE(typed) != type) Py_RETURN_FALSE;
    for (PyObject* empty : self->empty)
      if (!is_empty(empty)) Py_RETURN_FALSE;
    for (auto& [attributes, forward] : self->classes) {
      PyObject* now = PyObject_GetItem(attributes, self->forward);
      if (now == nullptr) PyErr_Clear();
      Py_XDECREF(now);
      if (now != forward) Py_RETURN_FALSE;
    }
    for (auto& [container, length] : self->longs) {
      if (PyObject_Size(container) != length) {
        PyErr_Clear();
        Py_RETURN_FALSE;
      }
    }
    PyObject* const* items = self->items.data();
    for (auto& [list, length] : self->lists) {
      if (!same_items(list, length, items)) Py_RETURN_FALSE;
      items += length;
    }
    for (const Getter& getter : self->getters)
      if (!same_values(self, getter)) Py_RETURN_FALSE;
    for (const TensorFacts& tensor : self->tensors)
      if (!same_tensor(self, tensor)) Py_RETURN_FALSE;
  } catch (const std::exception&) {
    Py_RETURN_FALSE;
  }
  Py_RETURN_TRUE;
}

PyObject* hold(Check* self, PyObject* object) {
  Py_INCREF(object);
  self->held.push_back(object);
  return object;
}

// Takes what is held by position, in the order of `compiled_checks.py`.
PyObject* check_new(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *owners, *dictionaries, *empty, *typed, *types, *classes, *forwards, *lists, *lengths,
      *items, *longs, *long_lengths, *getters, *tensors, *versions;
  if (!PyArg_ParseTuple(args, "O!O!O!O!O!O!O!O!O!O!O!O!O!O!O!", &PyList_Type, &owners, &PyList_Type,
                        &dictionaries, &PyList_Type, &empty, &PyList_Type, &typed, &PyList_Type,
                        &types, &PyList_Type, &classes, &PyList_Type, &forwards, &PyList_Type,
                        &lists, &PyList_Type, &lengths, &PyList_Type, &items, &PyList_Type, &longs,
                        &PyList_Type, &long_lengths, &PyList_Type, &getters, &PyList_Type, &tensors,
                        &PyList_Type, &versions))
    return nullptr;
  Check* self = reinterpret_cast<Check*>(type->tp_alloc(type, 0));
  if (self == nullptr) return nullptr;
  new (&self->held) decltype(self->held)();
  new (&self->owners) decltype(self->owners)();
  new (&self->dictionaries) decltype(self->dictionaries)();
  new (&self->orders) decltype(self->orders)();
  new (&self->empty) decltype(self->empty)();
  new (&self->typed) decltype(self->typed)();
  new (&self->classes) decltype(self->classes)();
  new (&self->lists) decltype(self->lists)();
  new (&self->items) decltype(self->items)();
  new (&self->longs) decltype(self->longs)();
  new (&self->getters) decltype(self->getters)();
  new (&self->values) decltype(self->values)();
  new (&self->tensors) decltype(self->tensors)();
  new (&self->geometry) decltype(self->geometry)();
  self->written = false;
  self->forward = hold(self, PyUnicode_InternFromString("forward"));
  Py_DECREF(self->forward);  // `held` has a reference of its own.
  const auto fail = [&](PyObject* error, const char* text) -> PyObject* {
    if (!PyErr_Occurred()) PyErr_SetString(error, text);
    Py_DECREF(self);
    return nullptr;
  };
  const auto add_dictionary = [&](PyObject* dictionary) {
    hold(self, dictionary);
    if (!watch(self, dictionary)) return false;
#if PY_VERSION_HEX < 0x030C0000
    self->dictionaries.emplace_back(dictionary, version_of(dictionary));
#else
    self->dictionaries.emplace_back(dictionary, 0);
#endif
    if (PyODict_Check(dictionary)) {
      // Behind the dictionary come five fields of `struct _odictobject`.
      const char* place = reinterpret_cast<const char*>(dictionary) + sizeof(PyDictObject);
      const size_t* count = reinterpret_cast<const size_t*>(place + 5 * sizeof(void*));
      self->orders.emplace_back(count, *count);
    }
    return true;
  };
  for (Py_ssize_t n = 0; n < PyList_GET_SIZE(owners); ++n) {
    PyObject* owner = hold(self, PyList_GET_ITEM(owners, n));
    PyObject** place = _PyObject_GetDictPtr(owner);
    if (place == nullptr || *place == nullptr) return fail(PyExc_TypeError, "no dictionary");
    PyObject* attributes = PyObject_GetAttrString(owner, "__dict__");
    Py_XDECREF(attributes);
    if (attributes != *place) return fail(PyExc_TypeError, "other attributes");
    self->owners.emplace_back(place, *place);
    if (!add_dictionary(*place)) return fail(PyExc_TypeError, "no watcher");
  }
  for (Py_ssize_t n = 0; n < PyList_GET_SIZE(dictionaries); ++n) {
    PyObject* dictionary = PyList_GET_ITEM(dictionaries, n);
    if (!PyDict_Check(dictionary) || !add_dictionary(dictionary))
      return fail(PyExc_TypeError, "no dictionary");
  }
  for (Py_ssize_t n = 0; n < PyList_GET_SIZE(empty); ++n) {
    PyObject* object = PyList_GET_ITEM(empty, n);
    if (!is_empty(object)) return fail(PyExc_TypeError, "not empty");
#if PY_VERSION_HEX >= 0x030C0000
    // Whatever is put into it is told of.
    if (PyDict_Check(object)) {
      if (!add_dictionary(object)) return fail(PyExc_TypeError, "no watcher");
      continue;
    }
#endif
    self->empty.push_back(hold(self, object));
  }
  for (Py_ssize_t n = 0; n < PyList_GET_SIZE(typed); ++n) {
    hold(self, PyList_GET_ITEM(types, n));
    self->typed.emplace_back(hold(self, PyList_GET_ITEM(typed, n)),
                             reinterpret_cast<PyTypeObject*>(PyList_GET_ITEM(types, n)));
  }
  for (Py_ssize_t n = 0; n < PyList_GET_SIZE(classes); ++n)
    self->classes.emplace_back(hold(self, PyList_GET_ITEM(classes, n)),
                               hold(self, PyList_GET_ITEM(forwards, n)));
  for (Py_ssize_t n = 0; n < PyList_GET_SIZE(lists); ++n)
    self->lists.emplace_back(hold(self, PyList_GET_ITEM(lists, n)),
                             PyLong_AsSsize_t(PyList_GET_ITEM(lengths, n)));
  for (Py_ssize_t n = 0; n < PyList_GET_SIZE(items); ++n)
    self->items.push_back(hold(self, PyList_GET_ITEM(items, n)));
  for (Py_ssize_t n = 0; n < PyList_GET_SIZE(longs); ++n)
    self->longs.emplace_back(hold(self, PyList_GET_ITEM(longs, n)),
                             PyLong_AsSsize_t(PyList_GET_ITEM(long_lengths, n)));
  for (Py_ssize_t n = 0; n < PyList_GET_SIZE(getters); ++n) {
    PyObject *get, *of, *values;
    if (!PyArg_ParseTuple(PyList_GET_ITEM(getters, n), "OOO!", &get, &of, &PyTuple_Type, &values))
      return fail(PyExc_TypeError, "no getter");
    const size_t count = PyTuple_GET_SIZE(values);
    self->getters.push_back({hold(self, get), hold(self, of), self->values.size(), count});
    for (size_t k = 0; k < count; ++k)
      self->values.push_back(hold(self, PyTuple_GET_ITEM(values, k)));
  }
  for (Py_ssize_t n = 0; n < PyList_GET_SIZE(tensors); ++n) {
    PyObject* object = hold(self, PyList_GET_ITEM(tensors, n));
    if (!is_tensor(object)) return fail(PyExc_TypeError, "no tensor");
    c10::TensorImpl* impl = impl_of(object);
    if (!impl->has_storage() || impl->is_python_dispatch())
      return fail(PyExc_TypeError, "no plain tensor");
    const auto sizes = impl->sizes();
    const auto strides = impl->strides();
    const c10::StorageImpl* storage = impl->unsafe_storage().unsafeGetStorageImpl();
    self->tensors.push_back({object, impl, storage, storage->data(), impl->storage_offset(),
                             impl->dtype().toScalarType(), impl->key_set(),
                             PyLong_AsLongLong(PyList_GET_ITEM(versions, n)),
                             self->geometry.size(), sizes.size()});
    self->geometry.insert(self->geometry.end(), sizes.begin(), sizes.end());
    self->geometry.insert(self->geometry.end(), strides.begin(), strides.end());
  }
  if (PyErr_Occurred()) return fail(PyExc_TypeError, "");
  return reinterpret_cast<PyObject*>(self);
}

int check_traverse(PyObject* object, visitproc visit, void* arg) {
  Check* self = reinterpret_cast<Check*>(object);
  Py_VISIT(Py_TYPE(object));
  for (PyObject* each : self->held) Py_VISIT(each);
  return 0;
}

int check_clear(PyObject* object) {
  Check* self = reinterpret_cast<Check*>(object);
  self->written = true;
  for (auto& [dictionary, _] : self->dictionaries) unwatch(self, dictionary);
  self->dictionaries.clear();
  self->orders.clear();
  std::vector<PyObject*> held;
  held.swap(self->held);
  for (PyObject* each : held) Py_DECREF(each);
  return 0;
}

void check_dealloc(PyObject* object) {
  Check* self = reinterpret_cast<Check*>(object);
  PyTypeObject* type = Py_TYPE(object);
  PyObject_GC_UnTrack(object);
  check_clear(object);
  using std::vector;
  self->held.~vector();
  self->owners.~vector();
  self->dictionaries.~vector();
  self->orders.~vector();
  self->empty.~vector();
  self->typed.~vector();
  self->classes.~vector();
  self->lists.~vector();
  self->items.~vector();
  self->longs.~vector();
  self->getters.~vector();
  self->values.~vector();
  self->tensors.~vector();
  self->geometry.~vector();
  type->tp_free(object);
  Py_DECREF(type);
}

// Calls whose arguments are plain tensors: of the same classes, geometries, dtypes, devices and kinds
// as those of a known call, under the same settings of the dispatcher, and in memory of their own.
struct ArgumentFacts {
  PyTypeObject* type;
  c10::DispatchKeySet keys;
  c10::ScalarType dtype;
  c10::Device device;
  bool requires_grad;
  size_t begin;  // of its sizes and strides
  size_t dimensions;
};

struct Arguments {
  PyObject_HEAD
  std::vector<ArgumentFacts> facts;
  std::vector<int64_t> geometry;
  std::vector<PyObject*> names;  // owned; of the keyword arguments, which come last, in order
  bool any_order;                // whether these may come in another order
  c10::impl::LocalDispatchKeySet settings;
  std::shared_ptr<c10::SafePyObject> mode;  // that of the default device, if there is one
  bool quiet;
};

// The modes that see functions of PyTorch's: how many there are, and the first.
size_t modes() { return at::impl::PythonTorchFunctionTLS::stack_len(); }

std::shared_ptr<c10::SafePyObject> first_mode() {
  return modes() ? at::impl::PythonTorchFunctionTLS::get_stack_at(0) : nullptr;
}

bool same_argument(const Arguments* self, const ArgumentFacts& known, PyObject* object) {
  if (Py_TYPE(object) != known.type) return false;
  const c10::TensorImpl* impl = impl_of(object);
  if (impl->key_set() != known.keys || impl->dtype().toScalarType() != known.dtype) return false;
  if (impl->device() != known.device || impl->requires_grad() != known.requires_grad) return false;
  const auto sizes = impl->sizes();
  const auto strides = impl->strides();
  if (sizes.size() != known.dimensions) return false;
  const int64_t* expected = self->geometry.data() + known.begin;
  for (size_t n = 0; n < known.dimensions; ++n)
    if (sizes[n] != expected[n] || strides[n] != expected[known.dimensions + n]) return false;
  return impl->numel() == 0 || impl->unsafe_storage().data() != nullptr;
}

struct Range {
  uintptr_t begin, end;
};

Range memory_of(PyObject* object) {
  const auto& storage = impl_of(object)->unsafe_storage();
  const auto begin = reinterpret_cast<uintptr_t>(storage.data());
  return {begin, begin + storage.nbytes()};
}

// Whether each has its own storage, which is not empty.
bool in_own_memory(PyObject* const* tensors, size_t count) {
  for (size_t n = 0; n < count; ++n) {
    const Range mine = memory_of(tensors[n]);
    if (mine.begin == 0 || mine.end == mine.begin) return false;
    for (size_t k = 0; k < n; ++k) {
      const Range other = memory_of(tensors[k]);
      if (mine.begin < other.end && other.begin < mine.end) return false;
    }
  }
  return true;
}

// The tensors of a call in a tuple, keyword arguments last; None where they do not fit.
PyObject* arguments_call(PyObject* object, PyObject* given, PyObject*) {
  Arguments* self = reinterpret_cast<Arguments*>(object);
  PyObject *args, *kwargs;
  if (!PyArg_UnpackTuple(given, "Arguments", 2, 2, &args, &kwargs)) return nullptr;
  if (!PyTuple_CheckExact(args) || !PyDict_CheckExact(kwargs)) Py_RETURN_NONE;
  const size_t named = self->names.size(), count = self->facts.size();
  if (static_cast<size_t>(PyTuple_GET_SIZE(args)) + named != count) Py_RETURN_NONE;
  if (static_cast<size_t>(PyDict_GET_SIZE(kwargs)) != named) Py_RETURN_NONE;
  const auto settings = c10::impl::tls_local_dispatch_key_set();
  if (settings.included_ != self->settings.included_ ||
      settings.excluded_ != self->settings.excluded_)
    Py_RETURN_NONE;
  // Modes want to see the operations, and so does forward AD.
  if (c10::impl::TorchDispatchModeTLS::stack_len() || modes() > 1) Py_RETURN_NONE;
  if (first_mode() != self->mode) Py_RETURN_NONE;
  if (torch::autograd::ForwardADLevel::try_get_by_idx(0) != nullptr) Py_RETURN_NONE;
  if (!self->quiet && c10::GradMode::is_enabled()) Py_RETURN_NONE;
  PyObject* tensors = Py_NewRef(args);
  if (named) {
    Py_DECREF(tensors);
    tensors = PyTuple_New(count);
    if (tensors == nullptr) return nullptr;
    for (size_t n = 0; n < count - named; ++n)
      PyTuple_SET_ITEM(tensors, n, Py_NewRef(PyTuple_GET_ITEM(args, n)));
    PyObject *name, *value;
    Py_ssize_t place = 0;
    for (size_t n = 0; n < named; ++n) {
      if (!PyDict_Next(kwargs, &place, &name, &value))
        value = nullptr;
      else if (name != self->names[n] && PyUnicode_Compare(name, self->names[n]) != 0)
        value = self->any_order ? PyDict_GetItemWithError(kwargs, self->names[n]) : nullptr;
      if (value == nullptr) {
        PyErr_Clear();
        Py_DECREF(tensors);
        Py_RETURN_NONE;
      }
      PyTuple_SET_ITEM(tensors, count - named + n, Py_NewRef(value));
    }
  }
  bool same = true;
  try {
    PyObject* const* items = PySequence_Fast_ITEMS(tensors);
    for (size_t n = 0; same && n < count; ++n) same = same_argument(self, self->facts[n], items[n]);
    same = same && (count < 2 || in_own_memory(items, count));
  } catch (const std::exception&) {
    same = false;
  }
  if (same) return tensors;
  Py_DECREF(tensors);
  Py_RETURN_NONE;
}

// Takes the tensors of a call that fits, the names of those that are keyword arguments, whether these
// may come in another order, and whether no gradients can be wanted. If a mode for functions is on, it is that of the default device.
PyObject* arguments_new(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *tensors, *names;
  int any_order, quiet;
  if (!PyArg_ParseTuple(args, "O!O!pp", &PyTuple_Type, &tensors, &PyTuple_Type, &names, &any_order,
                        &quiet))
    return nullptr;
  Arguments* self = reinterpret_cast<Arguments*>(type->tp_alloc(type, 0));
  if (self == nullptr) return nullptr;
  new (&self->facts) decltype(self->facts)();
  new (&self->geometry) decltype(self->geometry)();
  new (&self->names) decltype(self->names)();
  new (&self->settings) decltype(self->settings)(c10::impl::tls_local_dispatch_key_set());
  new (&self->mode) decltype(self->mode)(first_mode());
  self->any_order = any_order != 0;
  self->quiet = quiet != 0;
  for (Py_ssize_t n = 0; n < PyTuple_GET_SIZE(names); ++n)
    self->names.push_back(Py_NewRef(PyTuple_GET_ITEM(names, n)));
  for (Py_ssize_t n = 0; n < PyTuple_GET_SIZE(tensors); ++n) {
    PyObject* object = PyTuple_GET_ITEM(tensors, n);
    const c10::TensorImpl* impl =
        is_tensor(object) ? impl_of(object) : nullptr;
    if (impl == nullptr || !impl->has_storage() || impl->is_python_dispatch() ||
        impl->layout() != c10::kStrided || impl->has_symbolic_sizes_strides()) {
      PyErr_SetString(PyExc_TypeError, "no plain tensor");
      Py_DECREF(self);
      return nullptr;
    }
    const auto sizes = impl->sizes();
    const auto strides = impl->strides();
    // Classes of tensors are never freed: they are PyTorch's own, or are no plain tensors.
    self->facts.push_back({Py_TYPE(object), impl->key_set(), impl->dtype().toScalarType(),
                           impl->device(), impl->requires_grad(), self->geometry.size(),
                           sizes.size()});
    self->geometry.insert(self->geometry.end(), sizes.begin(), sizes.end());
    self->geometry.insert(self->geometry.end(), strides.begin(), strides.end());
  }
  return reinterpret_cast<PyObject*>(self);
}

void arguments_dealloc(PyObject* object) {
  Arguments* self = reinterpret_cast<Arguments*>(object);
  PyTypeObject* type = Py_TYPE(object);
  for (PyObject* name : self->names) Py_DECREF(name);
  using std::vector;
  self->facts.~vector();
  self->geometry.~vector();
  self->names.~vector();
  self->mode.~shared_ptr();
  type->tp_free(object);
  Py_DECREF(type);
}

PyType_Slot arguments_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(arguments_new)},
    {Py_tp_call, reinterpret_cast<void*>(arguments_call)},
    {Py_tp_dealloc, reinterpret_cast<void*>(arguments_dealloc)},
    {0, nullptr},
};

PyType_Spec arguments_spec = {
    "graphwright.Arguments", sizeof(Arguments), 0, Py_TPFLAGS_DEFAULT, arguments_slots,
};

PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(check_new)},
    {Py_tp_call, reinterpret_cast<void*>(check_call)},
    {Py_tp_traverse, reinterpret_cast<void*>(check_traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(check_clear)},
    {Py_tp_dealloc, reinterpret_cast<void*>(check_dealloc)},
    {0, nullptr},
};

PyType_Spec spec = {
    "graphwright.Check",
    sizeof(Check),
    0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    slots,
};

}  // namespace

// The classes, as new references; NULL with an exception set where one cannot be made.
// Whether a tensor's parts are where `impl_of` looks for them: at the address that it tells itself.
extern "C" __attribute__((visibility("default"))) int graphwright_knows_tensor(PyObject* tensor,
                                                                              size_t address) {
  return is_tensor(tensor) && reinterpret_cast<size_t>(impl_of(tensor)) == address;
}

extern "C" __attribute__((visibility("default"))) PyObject* graphwright_check_type() {
#if PY_VERSION_HEX >= 0x030C0000
  if (watcher < 0 && (watcher = PyDict_AddWatcher(on_write)) < 0) return nullptr;
#endif
  return PyType_FromSpec(&spec);
}

extern "C" __attribute__((visibility("default"))) PyObject* graphwright_arguments_type() {
  return PyType_FromSpec(&arguments_spec);
}
