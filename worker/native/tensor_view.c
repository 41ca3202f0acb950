/* Where a tensor's elements are, by DLPack's exchange API (torch's ATen/dlpack.h: DLPackExchangeAPI).

   - The table is found in a capsule of the class, torch.Tensor.__dlpack_c_exchange_api__. It lives as long as the process, so the
     capsule need not be held.
   - Fields may be added within a major version. Another major version may move them: then the table is not used. Its `previous`
     may lead to an older table, which is not looked for.
   - The protocol has two ways. One makes a DLManagedTensorVersioned, which owns the memory until its deleter is called. The
     other, which is used here, fills a DLTensor that we have on the stack and owns nothing. torch still owns data, shape and
     strides: they are valid until other code may run, and so are read at once.
   - It takes the class for which the table was found, and that is exactly Tensor or Parameter here. A subclass may have data
     elsewhere.
   - It does not wait for the device. On success it returns 0. Else an exception is set, as for a tensor that DLPack
     cannot describe: a sparse one. */

#include "tensor_view.h"

#include "layout.h"
#include "objects.h"

enum { MOST_DIMS = 8, HOST = 1 };

const Exchange *exchange_of(PyObject *capsule)
{
    const Exchange *exchange = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    if (exchange != NULL && (exchange->header.version.major != 1 || exchange->view == NULL)) {
        PyErr_SetString(PyExc_ValueError, "another version of DLPack");
        return NULL;
    }
    return exchange;
}

/* The number of elements at the address without a gap; 0 for another layout. An expanded dimension counts once. The order of
   elements means nothing to their least and largest, so a transposed tensor is read as it lies. */
static int64_t dense(const DLTensor *tensor, int *is_in_order)
{
    int64_t count = 1, sizes[MOST_DIMS], strides[MOST_DIMS];
    int dims = 0, in_order = 1;
    *is_in_order = 0;
    if (tensor->ndim < 0 || tensor->ndim > MOST_DIMS || (tensor->ndim && (!tensor->shape || !tensor->strides)))
        return 0;
    for (int i = tensor->ndim - 1; i >= 0; i--) {
        const int64_t size = tensor->shape[i], stride = tensor->strides[i];
        if (size <= 0 || stride < 0)
            return 0;
        if (size == 1)
            continue;
        if (stride != count)
            in_order = 0;
        if (stride == 0)
            continue;
        count *= size;
        int place = dims++;
        for (; place > 0 && strides[place - 1] > stride; place--) {
            sizes[place] = sizes[place - 1];
            strides[place] = strides[place - 1];
        }
        sizes[place] = size;
        strides[place] = stride;
    }
    *is_in_order = in_order;
    if (!in_order) {
        int64_t expected = 1;
        for (int i = 0; i < dims; i++) {
            if (strides[i] != expected)
                return 0;
            expected *= sizes[i];
        }
    }
    return count;
}

/* The code of a dtype in core/values.py; 0 for an unknown one */
static uint8_t code_of(const DLTensor *tensor)
{
    if (tensor->dtype.lanes != 1)
        return 0;
#define FLOAT_CODE(NAME, CODE, ENCODING, INF, TYPE, BITS)            \
    if (tensor->dtype.code == TYPE && tensor->dtype.bits == BITS)    \
        return CODE;
    EACH_FLOAT(FLOAT_CODE)
#define OTHER_CODE(NAME, CODE, TYPE, BITS)                           \
    if (tensor->dtype.code == TYPE && tensor->dtype.bits == BITS)    \
        return CODE;
    EACH_OTHER(OTHER_CODE)
    return 0;
}

/* A function of torch._C, looked up once and never freed. NULL, with no exception set, if this torch has none. */
static PyObject *torch_function(PyObject *name)
{
    PyObject *module = PyImport_ImportModule("torch._C");
    PyObject *found = module != NULL ? PyObject_GetAttr(module, name) : NULL;
    Py_XDECREF(module);
    drop_error();
    return found;
}

/* Whether a mode of the script's would see it if a property of a tensor is read. */
static int is_in_mode(void)
{
    static PyObject *depth_of;
    if (depth_of == NULL && (depth_of = torch_function(s__len_torch_function_stack)) == NULL)
        return 1;
    PyObject *depth = PyObject_CallNoArgs(depth_of);
    const int none = depth != NULL && PyLong_Check(depth) && PyLong_AsLong(depth) == 0;
    Py_XDECREF(depth);
    drop_error();
    return !none;
}

/* Whether torch refuses to describe a tensor: it has no storage (a sparse one, or one of vmap and grad), or it is nested,
   quantized or without memory of its own (meta). */
static int is_refused(PyObject *tensor)
{
    static PyObject *has_storage; /* it calls no mode */
    if (has_storage == NULL && (has_storage = torch_function(s__has_storage)) == NULL)
        return 0;
    return is_answer(PyObject_CallOneArg(has_storage, tensor), Py_False) ||
           (!is_in_mode() && (truth_of(tensor, s_is_nested) == 1 || truth_of(tensor, s_is_quantized) == 1 ||
                              truth_of(tensor, s_is_meta) == 1));
}

int view_of(const Exchange *exchange, PyObject *tensor, TensorView *view)
{
    /* A refusal takes 1 to 2 ms: torch writes the names of all C++ functions that run into its message. Asking before takes a
       hundred ns, which only a process that has had a refusal pays. */
    static int has_refused;
    if (has_refused && is_refused(tensor))
        return 0;
    if (exchange->view(tensor, &view->dl) != 0) {
        has_refused = 1;
        drop_error();
        return 0;
    }
    view->dtype = code_of(&view->dl);
    view->is_host = view->dl.device.type == HOST;
    view->count = dense(&view->dl, &view->is_in_order);
    /* NULL + offset would be undefined in C, and look like an address */
    view->address = view->dl.data != NULL ? (char *)view->dl.data + view->dl.offset : NULL;
    return view->dtype != 0;
}

int is_plain(const TensorView *view)
{
    return view->is_host && view->dtype < FLOATS_END && view->count > 0 && view->address != NULL;
}

int is_plain_integer(const TensorView *view)
{
    return view->is_host && view->dtype >= DTYPE_INT64 && view->dtype <= DTYPE_BOOL && view->count > 0 &&
           view->address != NULL;
}

/* Call a method without arguments. One in C is called by its descriptor, which is looked up once and never freed: CPython's
   lookup and call take as long as the method itself. What a subclass has in its place is not called: it could be a function
   of the script's, and torch's own answer is the one that counts. */
static PyObject *call_in_c(PyMethodDescrObject **known, PyObject *object, PyObject *name)
{
    if (*known == NULL) {
        PyObject *method = PyObject_GetAttr((PyObject *)Py_TYPE(object), name);
        if (method != NULL && Py_IS_TYPE(method, &PyMethodDescr_Type) &&
            ((PyMethodDescrObject *)method)->d_method->ml_flags == METH_NOARGS)
            *known = (PyMethodDescrObject *)method;
        else
            Py_XDECREF(method);
        drop_error();
    }
    if (*known != NULL && PyObject_TypeCheck(object, PyDescr_TYPE(*known)))
        return (*known)->d_method->ml_meth(object, NULL);
    return PyObject_CallMethodNoArgs(object, name);
}

/* The bytes of a storage: its length, which torch tells with half of the instructions of `nbytes`. 0 if it does not. */
static int length_of(PyObject *storage, uintptr_t *bytes)
{
    const Py_ssize_t length = PyObject_Size(storage);
    if (length < 0)
        drop_error();
    *bytes = (uintptr_t)length;
    return length >= 0;
}

/* Where a storage begins; 0 if torch does not tell. */
static int address_of(PyObject *storage, uintptr_t *address)
{
    static PyMethodDescrObject *data_ptr;
    PyObject *found = call_in_c(&data_ptr, storage, s_data_ptr);
    if (found == NULL) {
        drop_error();
        return 0;
    }
    *address = (uintptr_t)PyLong_AsVoidPtr(found); /* NULL for an address of 0, and for an error */
    Py_DECREF(found);
    if (*address != 0 || !PyErr_Occurred())
        return 1;
    drop_error();
    return 0;
}

int64_t bytes_of(const TensorView *view)
{
    return view->count * view->dl.dtype.bits / 8;
}

int is_in_storage(PyObject *tensor, const TensorView *view)
{
    const uintptr_t start = (uintptr_t)view->address, length = (uintptr_t)bytes_of(view);
    static PyMethodDescrObject *untyped_storage;
    uintptr_t memory = 0, bytes = 0;
    PyObject *storage = call_in_c(&untyped_storage, tensor, s_untyped_storage);
    if (storage == NULL) {
        drop_error();
        return -1;
    }
    const int known = length_of(storage, &bytes) && address_of(storage, &memory);
    Py_DECREF(storage);
    if (!known)
        return -1;
    /* in this order no difference is below 0, and no sum is too large for its type */
    return memory != 0 && memory <= start && start - memory <= bytes && length <= bytes - (start - memory);
}

/* A tensor of floats or integers that is the imaginary part of a conjugate */
static int is_negated(PyObject *tensor)
{
    return !is_answer(PyObject_CallMethodNoArgs(tensor, s_is_neg), Py_False);
}

int is_simple(const TensorView *view)
{
    return view->is_in_order && view->address != NULL && view->dtype <= DTYPE_BOOL;
}

int64_t elements_in_order(PyObject *tensor, const TensorView *view)
{
    return is_simple(view) && !is_negated(tensor) && is_in_storage(tensor, view) == 1 ? view->count : 0;
}

PyObject *dims_of(const TensorView *view)
{
    PyObject *dims = with_integers(PyTuple_New(view->dl.ndim), 0, view->dl.shape, view->dl.ndim);
    if (dims == NULL)
        drop_error();
    return dims;
}
