/* The inner loops over a tensor's bits, each in one pass. worker/stats/host_reduce.py has them in NumPy too, for where this was not
   built.

   A float's bits with the sign cleared sort as integers: see core/values.py. The addresses are those of host memory
   that the caller keeps alive. Nothing is allocated and no thread is started. The interpreter's lock is kept: at the
   speed of memory the largest tensors take a millisecond or two, and to get the lock back can take as long. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <structmember.h>

/* Each loop is compiled for the wide registers, too, which of them is there is asked at run time. */
#if defined(__GNUC__) && defined(__x86_64__)
#define FOR_EACH_WIDTH(LOOP, TYPE, BITS)                                                   \
    LOOP(TYPE, BITS, plain, )                                                              \
    LOOP(TYPE, BITS, avx2, __attribute__((target("avx2"))))                                \
    LOOP(TYPE, BITS, avx512, __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq"))))
#define CHOOSE(NAME) (width == 2 ? NAME##_avx512 : width == 1 ? NAME##_avx2 : NAME##_plain)
#else
#define FOR_EACH_WIDTH(LOOP, TYPE, BITS) LOOP(TYPE, BITS, plain, )
#define CHOOSE(NAME) NAME##_plain
#endif

static int width = 0;

#define EXTREMES(TYPE, BITS, NAME, TARGET)                                                                 \
    TARGET static void extremes##BITS##_##NAME(const void *memory, size_t count, int64_t *low, int64_t *high) \
    {                                                                                                      \
        const TYPE *data = memory;                                                                         \
        const TYPE mask = INT##BITS##_MAX;                                                                 \
        TYPE least = mask, most = 0;                                                                       \
        for (size_t i = 0; i < count; i++) {                                                               \
            TYPE bits = data[i] & mask;                                                                    \
            least = bits < least ? bits : least;                                                           \
            most = bits > most ? bits : most;                                                              \
        }                                                                                                  \
        *low = least;                                                                                      \
        *high = most;                                                                                      \
    }

FOR_EACH_WIDTH(EXTREMES, int16_t, 16)
FOR_EACH_WIDTH(EXTREMES, int32_t, 32)
FOR_EACH_WIDTH(EXTREMES, int64_t, 64)

/* In blocks whose counts fit the element's own type: that many can be added up in one register. */
#define BELOW(TYPE, BITS, NAME, TARGET)                                                                            \
    TARGET static void below##BITS##_##NAME(const void *memory, size_t count, int64_t limit, int64_t *zeros, int64_t *small) \
    {                                                                                                              \
        const TYPE *data = memory;                                                                                 \
        const TYPE mask = INT##BITS##_MAX, least = (TYPE)limit;                                                    \
        for (size_t start = 0; start < count; start += 16384) {                                                    \
            const size_t end = count - start < 16384 ? count : start + 16384;                                      \
            TYPE none = 0, below = 0;                                                                              \
            for (size_t i = start; i < end; i++) {                                                                 \
                TYPE bits = data[i] & mask;                                                                        \
                none = (TYPE)(none + (bits == 0));                                                                 \
                below = (TYPE)(below + (bits < least));                                                            \
            }                                                                                                      \
            *zeros += none;                                                                                        \
            *small += below;                                                                                       \
        }                                                                                                          \
    }

FOR_EACH_WIDTH(BELOW, int16_t, 16)
FOR_EACH_WIDTH(BELOW, int32_t, 32)
FOR_EACH_WIDTH(BELOW, int64_t, 64)

/* -- several threads --------------------------------------------------------------------------------------------

   A large tensor is read by the threads that have written it, each the part that is still in its own cache: torch's
   OpenMP threads, which share a loop out in equal stretches, in order (at::parallel_for). They are reached by the entry
   points that a compiler calls for `#pragma omp parallel`, in the very library that torch has loaded: with another one
   there would be twice as many threads. */

static void (*omp_parallel)(void (*part)(void *), void *shared, unsigned threads, unsigned flags);
static int (*omp_most_threads)(void), (*omp_is_parallel)(void), (*omp_thread)(void), (*omp_team)(void);

enum { MOST_THREADS = 64, LARGE = 1 << 18 };

typedef struct {
    const char *memory;
    size_t count;
    long bytes;
    struct { int64_t low, high, apart[6]; } found[MOST_THREADS];
} Shared;

static void extremes_here(const void *memory, size_t count, long bytes, int64_t *low, int64_t *high)
{
    if (bytes == 4)
        CHOOSE(extremes32)(memory, count, low, high);
    else if (bytes == 2)
        CHOOSE(extremes16)(memory, count, low, high);
    else
        CHOOSE(extremes64)(memory, count, low, high);
}

static void extremes_of_part(void *argument)
{
    Shared *shared = argument;
    const size_t team = (size_t)omp_team(), thread = (size_t)omp_thread();
    const size_t stretch = (shared->count + team - 1) / team, start = thread * stretch;
    if (start >= shared->count)
        return;
    const size_t count = shared->count - start < stretch ? shared->count - start : stretch;
    extremes_here(shared->memory + start * (size_t)shared->bytes, count, shared->bytes, &shared->found[thread].low,
                  &shared->found[thread].high);
}

/* Smallest and largest, the sign bit cleared; of nothing the largest number and 0 */
static void extremes_of(const void *memory, size_t count, long bytes, int64_t *low, int64_t *high)
{
    int threads = 1;
    if (omp_parallel != NULL && count * (size_t)bytes >= LARGE && !omp_is_parallel())
        threads = omp_most_threads();
    if (threads <= 1) {
        extremes_here(memory, count, bytes, low, high);
        return;
    }
    if (threads > MOST_THREADS)
        threads = MOST_THREADS;
    Shared shared = {memory, count, bytes, {{0}}};
    for (int i = 0; i < threads; i++)
        shared.found[i].low = INT64_MAX;
    omp_parallel(extremes_of_part, &shared, (unsigned)threads, 0);
    *low = INT64_MAX;
    *high = 0;
    for (int i = 0; i < threads; i++) {
        *low = shared.found[i].low < *low ? shared.found[i].low : *low;
        *high = shared.found[i].high > *high ? shared.found[i].high : *high;
    }
}

static PyObject *pair(int64_t first, int64_t second)
{
    PyObject *tuple = PyTuple_New(2);
    if (tuple == NULL)
        return NULL;
    PyObject *one = PyLong_FromLongLong(first), *other = PyLong_FromLongLong(second);
    if (one == NULL || other == NULL) {
        Py_XDECREF(one);
        Py_XDECREF(other);
        Py_DECREF(tuple);
        return NULL;
    }
    PyTuple_SetItem(tuple, 0, one);
    PyTuple_SetItem(tuple, 1, other);
    return tuple;
}

/* (address, count, bytes per element) of the arguments; -1 with an exception set */
static int memory_of(PyObject *const *args, void **memory, size_t *count, long *bytes)
{
    *memory = PyLong_AsVoidPtr(args[0]);
    *count = PyLong_AsSize_t(args[1]);
    *bytes = PyLong_AsLong(args[2]);
    return PyErr_Occurred() ? -1 : 0;
}

static PyObject *wrong(const char *expected)
{
    PyErr_SetString(PyExc_TypeError, expected);
    return NULL;
}

static PyObject *extremes(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    void *memory;
    size_t count;
    long bytes;
    int64_t low = 0, high = 0;
    (void)module;
    if (given != 3)
        return wrong("expected extremes(address, count, bytes)");
    if (memory_of(args, &memory, &count, &bytes) < 0)
        return NULL;
    if (bytes != 4 && bytes != 2 && bytes != 8)
        return wrong("expected elements of 2, 4 or 8 bytes");
    extremes_of(memory, count, bytes, &low, &high);
    return pair(low, high);
}

static PyObject *use_threads(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    void *found[5] = {NULL};
    (void)module;
    if (given != 0 && given != 5)
        return wrong("expected use_threads(parallel, most, is_parallel, thread, team) or use_threads()");
    for (int i = 0; i < given; i++)
        found[i] = PyLong_AsVoidPtr(args[i]);
    if (PyErr_Occurred())
        return NULL;
    memcpy(&omp_parallel, &found[0], sizeof found[0]);
    memcpy(&omp_most_threads, &found[1], sizeof found[0]);
    memcpy(&omp_is_parallel, &found[2], sizeof found[0]);
    memcpy(&omp_thread, &found[3], sizeof found[0]);
    memcpy(&omp_team, &found[4], sizeof found[0]);
    Py_RETURN_NONE;
}

static PyObject *below(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    void *memory;
    size_t count;
    long bytes;
    int64_t zeros = 0, small = 0;
    (void)module;
    if (given != 4)
        return wrong("expected below(address, count, bytes, limit)");
    const int64_t limit = PyLong_AsLongLong(args[3]);
    if (memory_of(args, &memory, &count, &bytes) < 0)
        return NULL;
    if (bytes == 4)
        CHOOSE(below32)(memory, count, limit, &zeros, &small);
    else if (bytes == 2)
        CHOOSE(below16)(memory, count, limit, &zeros, &small);
    else if (bytes == 8)
        CHOOSE(below64)(memory, count, limit, &zeros, &small);
    else
        return wrong("expected elements of 2, 4 or 8 bytes");
    return pair(zeros, small);
}

/* -- whole frames -----------------------------------------------------------------------------------------------

   `FrameWriter` writes what nearly every frame and gradient is into the page that is open, as hooks.py, rows.py, gradients.py
   and recorder/writer.py do. Whatever is not that (see its docstring) it leaves to them, and then it has written and
   remembered nothing. It works on their dictionaries, and its cursor is theirs: the offset of the open segment, and the
   counts in that segment's header. All that can fail comes before the first store. */

enum {  /* core/recorder/layout.py, with which worker/record/native_writer.py compares those of sizes */
    SEGMENT_HEADER = 256, FRAME_BYTES = 32, ROW_BYTES = 16, VALUE_BYTES = 24,
    FRAMES_PER_SEGMENT = 128, ROWS_PER_SEGMENT = 384, VALUES_PER_SEGMENT = 240,
    ROWS_AT = SEGMENT_HEADER + FRAMES_PER_SEGMENT * FRAME_BYTES,
    VALUES_AT = ROWS_AT + ROWS_PER_SEGMENT * ROW_BYTES,
    S_PAGE = 1, S_BATCH = 3, S_FRAMES = 6, S_ROWS = 7, S_VALUES = 8, S_FRAME_BASE = 9, S_VALUE_BASE = 10,
    F_PHASE = 16, F_MODULE = 21,
    PHASE_BACKWARD = 1, PHASE_OPTIMIZER = 3, RANK_BACKWARD = 7,
    KIND_MEASURED = 0, KIND_NONE = 1, KIND_NOT_A_TENSOR = 2, MARK_SCALED = 4,
    COUNT_EVERY = 10,
};
#define NOTHING 0xFFFFFFFFu

/* Of dlpack.h, what does not change within its major version 1. */
typedef struct {
    void *data;
    struct { int32_t type, id; } device;
    int32_t ndim;
    struct { uint8_t code, bits; uint16_t lanes; } dtype;
    int64_t *shape, *strides;
    uint64_t offset;
} DLTensor;

typedef struct {
    struct { struct { uint32_t major, minor; } version; void *previous; } header;
    void *allocate, *from_tensor, *to_tensor;
    int (*view)(void *tensor, DLTensor *out);
    void *stream;
} Exchange;

enum { ROLES = 16, MOST_ROWS = 32, MOST_DIMS = 8 };

/* Names that are asked for in every call, each made once. */
#define EACH_NAME(DO)                                                                                              \
    DO(id) DO(seq) DO(root) DO(page) DO(slots) DO(number) DO(skipped) DO(grad) DO(scaled) DO(is_leaf) DO(grad_fn)     \
    DO(next_id) DO(_version) DO(_parameters) DO(_backward_hooks) DO(_register_hook_dict) DO(_attached) DO(_page)    \
    DO(before_parameter) DO(requires_grad) DO(watch_output) DO(watch_parameter) DO(of_output) DO(of_parameter) DO(_is_compiling_flag)
#define DECLARE(NAME) static PyObject *s_##NAME;
EACH_NAME(DECLARE)
static PyObject *inputs[ROLES], *outputs[ROLES], *output_role, *of_outputs[ROLES], *of_output_role;
static PyTypeObject *output_hook_type, *parameter_hook_type;

typedef struct {
    PyObject_HEAD
    PyObject *memory, *cursor, *seen, *by_memory, *weights, *shapes, *ignored, *waived, *watched, *local, *kwargs;
    PyObject *gradients, *progress, *issued, *numbers, *tensor, *parameter, *modes, *compiler, *hook_dict, *handle;
    char *base;
    Py_buffer cell;
    const Exchange *exchange;
    int forward, with_weights, with_grads;
    int64_t near[5], largest[5];
} FrameWriter;

#define EACH_OBJECT(DO)                                                                                       \
    DO(memory) DO(cursor) DO(seen) DO(by_memory) DO(weights) DO(shapes) DO(ignored) DO(waived) DO(watched)   \
    DO(local) DO(kwargs) DO(gradients) DO(progress) DO(issued) DO(numbers) DO(tensor) DO(parameter) DO(modes) \
    DO(compiler) DO(hook_dict) DO(handle)

typedef struct {
    uint32_t slot, shape;
    int64_t value;  /* its index in the page */
    uint8_t dtype, kind;
    uint16_t mark;
    int is_fresh, is_weight, is_output, position;
    int64_t version, low, high, meta, count;
    void *address;       /* NULL if it is not to be found again by its memory */
    PyObject *object, *key, *seen, *place, *known;  /* the tensor, and what is remembered of it */
} Entry;

typedef struct {
    Entry rows[MOST_ROWS];
    int used, fresh;
    int64_t *segment, at, page;
    int64_t frames, row_count, values;
} Frame;

static void clear_frame(Frame *frame)
{
    for (int i = 0; i < frame->used; i++) {
        Entry *row = &frame->rows[i];
        Py_CLEAR(row->object);
        Py_CLEAR(row->key);
        Py_CLEAR(row->seen);
        Py_CLEAR(row->place);
        Py_CLEAR(row->known);
    }
    frame->used = 0;
}

static int is_ref_to(PyObject *ref, PyObject *object)
{
    if (!PyWeakref_CheckRef(ref))
        return 0;
#if PY_VERSION_HEX >= 0x030D0000
    PyObject *found = NULL;
    if (PyWeakref_GetRef(ref, &found) < 0)
        PyErr_Clear();
    Py_XDECREF(found);  /* somebody else holds it, or it is not the one */
    return found == object;
#else
    return PyWeakref_GetObject(ref) == object;
#endif
}

static int is_alive(PyObject *ref)
{
    if (!PyWeakref_CheckRef(ref))
        return 0;
#if PY_VERSION_HEX >= 0x030D0000
    PyObject *found = NULL;
    if (PyWeakref_GetRef(ref, &found) < 0)
        PyErr_Clear();
    Py_XDECREF(found);
    return found != NULL;
#else
    return PyWeakref_GetObject(ref) != Py_None;
#endif
}

/* An attribute that is an integer. 0 if not, with no exception set: whoever looks again in Python will tell. */
static int integer_of(PyObject *object, PyObject *name, int64_t *number)
{
    PyObject *found = PyObject_GetAttr(object, name);
    if (found == NULL) {
        PyErr_Clear();
        return 0;
    }
    *number = PyLong_Check(found) ? PyLong_AsLongLong(found) : -1;
    const int good = PyLong_Check(found) && !PyErr_Occurred();
    PyErr_Clear();
    Py_DECREF(found);
    return good;
}

/* 1, 0, or -1 if nobody knows */
static int truth_of(PyObject *object, PyObject *name)
{
    PyObject *found = PyObject_GetAttr(object, name);
    if (found == NULL) {
        PyErr_Clear();
        return -1;
    }
    const int truth = found == Py_True ? 1 : found == Py_False ? 0 : -1;
    Py_DECREF(found);
    return truth;
}

/* Borrowed, NULL with no exception set */
static PyObject *find(PyObject *dict, PyObject *key)
{
    PyObject *found = PyDict_GetItemWithError(dict, key);
    if (found == NULL)
        PyErr_Clear();
    return found;
}

static int64_t item(PyObject *tuple, Py_ssize_t position)
{
    return PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, position));
}

static int64_t *header(FrameWriter *self)
{
    return (int64_t *)self->base;
}

/* The segment that is open, and what is in it; 0 if there is none. */
static int begin(FrameWriter *self, Frame *frame)
{
    frame->used = frame->fresh = 0;
    if (self->cell.buf == NULL)
        return 0;
    frame->at = *(int64_t *)self->cell.buf;
    if (frame->at < 0)
        return 0;
    frame->segment = (int64_t *)(self->base + frame->at);
    frame->page = frame->segment[S_PAGE];
    frame->frames = frame->segment[S_FRAMES];
    frame->row_count = frame->segment[S_ROWS];
    frame->values = frame->segment[S_VALUES];
    return frame->frames < FRAMES_PER_SEGMENT;
}

/* A mode would be shown our look at an attribute; of what is compiled here, nothing is known. */
static int is_unseen(FrameWriter *self)
{
    PyObject *depth = PyObject_CallNoArgs(self->modes);
    const int none = depth != NULL && PyLong_Check(depth) && PyLong_AsLong(depth) == 0;
    Py_XDECREF(depth);
    PyErr_Clear();
    return none && find(self->compiler, s__is_compiling_flag) == Py_False;
}

static int issued_now(FrameWriter *self, int64_t *seq)
{
    PyObject *found = PyObject_CallNoArgs(self->issued);
    const int good = found != NULL && PyLong_Check(found);
    *seq = good ? PyLong_AsLongLong(found) : -1;
    Py_XDECREF(found);
    PyErr_Clear();
    return good;
}

static Entry *next_row(FrameWriter *self, Frame *frame, PyObject *slots, PyObject *role)
{
    if (frame->used == MOST_ROWS || frame->row_count + frame->used >= ROWS_PER_SEGMENT)
        return NULL;
    PyObject *slot = find(slots, role);
    if (slot == NULL || (PyDict_GET_SIZE(self->ignored) && find(self->ignored, slot) != NULL))
        return NULL;
    const long long number = PyLong_AsLongLong(slot);
    if (number < 0 || number >= NOTHING) {
        PyErr_Clear();
        return NULL;
    }
    Entry *row = &frame->rows[frame->used++];
    memset(row, 0, sizeof *row);
    row->slot = (uint32_t)number;
    return row;
}

/* How many elements lie at the address without a gap, an expanded dimension once; 0 for another layout. */
static int64_t dense(const DLTensor *tensor, int *is_contiguous)
{
    int64_t count = 1, sizes[MOST_DIMS], strides[MOST_DIMS];
    int dims = 0, in_order = 1;
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
    *is_contiguous = in_order;
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

/* NULL with no exception set */
static PyObject *dims_of(const DLTensor *tensor)
{
    PyObject *dims = PyTuple_New(tensor->ndim);
    for (int i = 0; dims != NULL && i < tensor->ndim; i++) {
        PyObject *size = PyLong_FromLongLong(tensor->shape[i]);
        if (size == NULL)
            Py_CLEAR(dims);
        else
            PyTuple_SET_ITEM(dims, i, size);
    }
    PyErr_Clear();
    return dims;
}

static int shape_of(FrameWriter *self, const DLTensor *tensor, uint32_t *shape)
{
    PyObject *dims = dims_of(tensor);
    if (dims == NULL)
        return 0;
    PyObject *found = find(self->shapes, dims);
    Py_DECREF(dims);
    if (found == NULL)
        return 0;
    *shape = (uint32_t)PyLong_AsUnsignedLongMask(found);
    return 1;
}

/* Where a plain float tensor is, what type and shape; 0 for anything else. */
static int place_of(const Exchange *exchange, PyObject *tensor, Entry *row, DLTensor *view)
{
    int is_contiguous;
    if (exchange->view(tensor, view) != 0) {
        PyErr_Clear();
        return 0;
    }
    if (view->device.type != 1 || view->dtype.lanes != 1 || view->data == NULL)
        return 0;
    if (view->dtype.code == 2 && view->dtype.bits == 32)
        row->dtype = 1;
    else if (view->dtype.code == 2 && view->dtype.bits == 16)
        row->dtype = 2;
    else if (view->dtype.code == 4 && view->dtype.bits == 16)
        row->dtype = 3;
    else if (view->dtype.code == 2 && view->dtype.bits == 64)
        row->dtype = 4;
    else
        return 0;
    row->count = dense(view, &is_contiguous);
    if (row->count <= 0)
        return 0;
    row->address = is_contiguous ? (char *)view->data + view->offset : NULL;
    return 1;
}

/* dtype code (core/values.py) -> the bits of inf, and its encoding */
static const int64_t inf_bits[] = {0, 0x7F800000, 0x7C00, 0x7F80, 0x7FF0000000000000};
static const int64_t encodings[] = {0, 2, 3, 4, 1};

/* 0 if something in it is non-finite */
static int read_bits(const DLTensor *view, Entry *row)
{
    const void *memory = (char *)view->data + view->offset;
    extremes_of(memory, (size_t)row->count, view->dtype.bits / 8, &row->low, &row->high);
    row->meta = encodings[row->dtype] << 8;
    row->kind = KIND_MEASURED;
    row->is_fresh = 1;
    return row->high < inf_bits[row->dtype];
}

static int is_near_overflow(FrameWriter *self, const Entry *row)
{
    return self->near[row->dtype] <= row->high && row->high < self->largest[row->dtype];
}

/* Zeros and subnormals of low precision are counted in one batch of so many. */
static int is_counted(const Frame *frame, const Entry *row)
{
    return (row->dtype == 2 || row->dtype == 3) && frame->segment[S_BATCH] % COUNT_EVERY == 0;
}

static int take_value(Frame *frame, Entry *row)
{
    if (frame->values + frame->fresh >= VALUES_PER_SEGMENT)
        return 0;
    row->value = frame->segment[S_VALUE_BASE] + frame->values + frame->fresh++;
    return 1;
}

/* A row from what is remembered: (ref, version, value, shape, dtype, kind, flags, high, meta) */
static int from_seen(PyObject *seen, Entry *row)
{
    if (item(seen, 6) != 0)
        return 0;
    row->value = item(seen, 2);
    row->shape = (uint32_t)item(seen, 3);
    row->dtype = (uint8_t)item(seen, 4);
    row->kind = (uint8_t)item(seen, 5);
    return !PyErr_Occurred();
}

static int is_seen(PyObject *seen)
{
    return PyTuple_CheckExact(seen) && PyTuple_GET_SIZE(seen) == 9;
}

/* The tensor of an input or an output: Rows.leaf */
static int tensor_row(FrameWriter *self, Frame *frame, Entry *row, PyObject *tensor, PyObject *cls)
{
    DLTensor view;
    row->object = Py_NewRef(tensor);
    if (!integer_of(tensor, s__version, &row->version) || row->version < 0)
        return 0;
    for (int i = 0; i < frame->used - 1; i++) {
        const Entry *other = &frame->rows[i];
        if (other->object == tensor && other->version == row->version) {
            row->value = other->value;
            row->shape = other->shape;
            row->dtype = other->dtype;
            row->kind = other->kind;
            return 1;
        }
    }
    row->key = PyLong_FromVoidPtr(tensor);
    if (row->key == NULL)
        return 0;
    PyObject *seen = find(self->seen, row->key);
    if (seen != NULL && is_seen(seen) && is_ref_to(PyTuple_GET_ITEM(seen, 0), tensor) && item(seen, 1) == row->version)
        return from_seen(seen, row);
    if (!place_of(self->exchange, tensor, row, &view) || !shape_of(self, &view, &row->shape))
        return 0;
    if (cls != self->tensor)
        row->address = NULL;
    if (row->address != NULL) {
        for (int i = 0; i < frame->used - 1; i++) {
            const Entry *other = &frame->rows[i];
            if (other->is_fresh && other->address == row->address && other->count == row->count &&
                other->dtype == row->dtype && other->version == row->version) {
                row->value = other->value;
                row->kind = other->kind;
                return 1;
            }
        }
        row->place = Py_BuildValue("(NLi)", PyLong_FromVoidPtr(row->address), (long long)row->count, (int)row->dtype);
        if (row->place == NULL)
            return 0;
        seen = find(self->by_memory, row->place);
        if (seen != NULL && is_seen(seen) && item(seen, 1) == row->version && is_alive(PyTuple_GET_ITEM(seen, 0))) {
            const uint32_t shape = row->shape;
            const int good = from_seen(seen, row);
            row->shape = shape;
            return good;
        }
    }
    if (is_counted(frame, row) || !read_bits(&view, row))
        return 0;
    if (row->is_output && is_near_overflow(self, row))
        return 0;
    return take_value(frame, row);
}

/* A leaf of the arguments or of what was returned; `is_output` is where in it, from 1 on, or 0 */
static int leaf_row(FrameWriter *self, Frame *frame, PyObject *slots, PyObject *role, PyObject *leaf, int is_output)
{
    PyObject *cls = (PyObject *)Py_TYPE(leaf);
    Entry *row = next_row(self, frame, slots, role);
    if (row == NULL)
        return 0;
    row->is_output = is_output;
    if (cls == self->tensor || cls == self->parameter)
        return tensor_row(self, frame, row, leaf, cls);
    row->shape = NOTHING;
    row->value = NOTHING;
    if (leaf == Py_None)
        row->kind = KIND_NONE;
    else if (PyBool_Check(leaf) || PyLong_CheckExact(leaf) || PyFloat_CheckExact(leaf) || PyUnicode_CheckExact(leaf))
        row->kind = KIND_NOT_A_TENSOR;
    else
        return 0;
    return 1;
}

/* A parameter: Rows.weight. Its numbers are read again after each optimizer step. */
static int weight_row(FrameWriter *self, Frame *frame, PyObject *slots, PyObject *name, PyObject *weight, int64_t step)
{
    DLTensor view;
    Entry *row = next_row(self, frame, slots, name);
    if (row == NULL || ((PyObject *)Py_TYPE(weight) != self->parameter && (PyObject *)Py_TYPE(weight) != self->tensor))
        return 0;
    row->is_weight = 1;
    row->object = Py_NewRef(weight);
    if (!integer_of(weight, s__version, &row->version) || row->version < 0)
        return 0;
    row->key = PyLong_FromVoidPtr(weight);
    if (row->key == NULL)
        return 0;
    PyObject *seen = find(self->seen, row->key);
    if (seen != NULL && is_seen(seen) && is_ref_to(PyTuple_GET_ITEM(seen, 0), weight) && item(seen, 1) == row->version)
        return from_seen(seen, row);
    for (int i = 0; i < frame->used - 1; i++)
        if (frame->rows[i].object == weight)
            return 0;  /* under two names in one module */
    if (!place_of(self->exchange, weight, row, &view) || !shape_of(self, &view, &row->shape))
        return 0;
    row->address = NULL;
    PyObject *known = find(self->weights, row->key);
    if (known != NULL && PyTuple_CheckExact(known) && PyTuple_GET_SIZE(known) == 4 &&
        is_ref_to(PyTuple_GET_ITEM(known, 0), weight) && item(known, 1) == row->version && item(known, 2) == step) {
        PyObject *numbers = PyTuple_GET_ITEM(known, 3);
        if ((PyObject *)Py_TYPE(numbers) != self->numbers || item(numbers, 3) != KIND_MEASURED)
            return 0;
        row->low = item(numbers, 0);
        row->high = item(numbers, 1);
        row->meta = item(numbers, 2);
        row->is_fresh = 1;
        row->known = Py_NewRef(known);
        return (row->meta & 0xFF) == 0 && !PyErr_Occurred() && take_value(frame, row);
    }
    return read_bits(&view, row) && take_value(frame, row);
}

/* measure.TensorStats of a row that was read; NULL with an exception set */
static PyObject *numbers_of(PyTypeObject *type, const Entry *row)
{
    PyObject *numbers = type->tp_alloc(type, 4);
    const int64_t fields[] = {row->low, row->high, row->meta, KIND_MEASURED};
    for (int i = 0; numbers != NULL && i < 4; i++) {
        PyObject *number = PyLong_FromLongLong(fields[i]);
        if (number == NULL)
            Py_CLEAR(numbers);
        else
            PyTuple_SET_ITEM(numbers, i, number);
    }
    return numbers;
}

/* All that is remembered of the fresh rows is made before any of it is put in its place. */
static int make_memories(FrameWriter *self, Frame *frame, int64_t step)
{
    for (int i = 0; i < frame->used; i++) {
        Entry *row = &frame->rows[i];
        if (!row->is_fresh)
            continue;
        PyObject *ref = row->known != NULL ? Py_NewRef(PyTuple_GET_ITEM(row->known, 0))
                                           : PyWeakref_NewRef(row->object, NULL);
        if (ref == NULL)
            return 0;
        if (row->is_weight && row->known == NULL) {
            PyObject *numbers = numbers_of((PyTypeObject *)self->numbers, row);
            if (numbers == NULL) {
                Py_DECREF(ref);
                return 0;
            }
            row->known = Py_BuildValue("(OLLN)", ref, (long long)row->version, (long long)step, numbers);
            if (row->known == NULL) {
                Py_DECREF(ref);
                return 0;
            }
        }
        row->seen = Py_BuildValue("(NLLIiiiLL)", ref, (long long)row->version, (long long)row->value,
                                  (unsigned int)row->shape, (int)row->dtype, (int)row->kind, 0, (long long)row->high,
                                  (long long)row->meta);
        if (row->seen == NULL)
            return 0;
    }
    return 1;
}

static void remember(FrameWriter *self, Frame *frame)
{
    for (int i = 0; i < frame->used; i++) {
        Entry *row = &frame->rows[i];
        if (row->seen == NULL)
            continue;
        if (PyDict_SetItem(self->seen, row->key, row->seen) < 0 ||
            (row->place != NULL && PyDict_SetItem(self->by_memory, row->place, row->seen) < 0) ||
            (row->is_weight && PyDict_SetItem(self->weights, row->key, row->known) < 0))
            PyErr_Clear();  /* no memory: it will be looked at again */
    }
}

/* The stores, values first: a reader goes by the counts. 0 if somebody else has written meanwhile. */
static int store(FrameWriter *self, Frame *frame, int64_t module, int64_t parent, int64_t depth, int64_t phase, int64_t seq,
                 int64_t collectives)
{
    int64_t *segment = frame->segment;
    if (*(int64_t *)self->cell.buf != frame->at || segment[S_PAGE] != frame->page ||
        segment[S_FRAMES] != frame->frames || segment[S_ROWS] != frame->row_count || segment[S_VALUES] != frame->values)
        return 0;
    char *start = (char *)segment;
    char *value = start + VALUES_AT + frame->values * VALUE_BYTES;
    char *place = start + ROWS_AT + frame->row_count * ROW_BYTES;
    for (int i = 0; i < frame->used; i++) {
        const Entry *row = &frame->rows[i];
        if (row->is_fresh) {
            const int64_t numbers[] = {row->low, row->high, row->meta};
            memcpy(value, numbers, sizeof numbers);
            value += VALUE_BYTES;
        }
        const uint32_t words[] = {row->slot, (uint32_t)row->value, row->shape};
        memcpy(place, words, sizeof words);
        place[12] = (char)row->dtype;
        place[13] = (char)row->kind;
        memcpy(place + 14, &row->mark, sizeof row->mark);
        place += ROW_BYTES;
    }
    const int64_t index = segment[S_FRAME_BASE] + frame->frames;
    const uint32_t names[] = {(uint32_t)module, (uint32_t)parent};
    const int16_t deep = (int16_t)(depth > INT16_MAX ? INT16_MAX : depth);
    const uint32_t rest[] = {(uint32_t)frame->row_count, (uint32_t)frame->used, (uint32_t)index};
    place = start + SEGMENT_HEADER + frame->frames * FRAME_BYTES;
    memcpy(place, names, sizeof names);
    memcpy(place + 8, &deep, sizeof deep);
    place[10] = (char)phase;
    place[11] = (char)(collectives > 255 ? 255 : collectives);
    memcpy(place + 12, &seq, sizeof seq);
    memcpy(place + 20, rest, sizeof rest);
    volatile int64_t *counts = segment;
    counts[S_VALUES] = frame->values + frame->fresh;
    counts[S_ROWS] = frame->row_count + frame->used;
    counts[S_FRAMES] = frame->frames + 1;
    return 1;
}

/* -- gradient hooks --------------------------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    PyObject *taker, *gradients, *info, *role, *page;
} Hook;

static int hook_traverse(Hook *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->taker);
    Py_VISIT(self->gradients);
    Py_VISIT(self->info);
    Py_VISIT(self->page);
    return 0;
}

static int hook_clear(Hook *self)
{
    Py_CLEAR(self->taker);
    Py_CLEAR(self->gradients);
    Py_CLEAR(self->info);
    Py_CLEAR(self->role);
    Py_CLEAR(self->page);
    return 0;
}

static void hook_dealloc(Hook *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    hook_clear(self);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

static PyObject *new_hook(PyTypeObject *type, PyObject *taker, PyObject *gradients, PyObject *info, PyObject *role,
                          PyObject *page)
{
    Hook *hook = (Hook *)type->tp_alloc(type, 0);
    if (hook != NULL) {
        hook->taker = Py_NewRef(taker);
        hook->gradients = Py_NewRef(gradients);
        hook->info = Py_NewRef(info);
        hook->role = Py_NewRef(role);
        hook->page = Py_XNewRef(page);
    }
    return (PyObject *)hook;
}

/* Gradients.take and put. 1 when it is written; 0 when it is left to them. `is_local`: Gradients._local, too. */
static int take_gradient(FrameWriter *self, Hook *hook, PyObject *page, PyObject *gradient, int is_local)
{
    Frame frame;
    DLTensor view;
    int64_t number, id, seq, version = 0;
    PyObject *slots = NULL, *key = NULL, *memory = NULL;
    int taken = 0;
    PyObject *cls = (PyObject *)Py_TYPE(gradient);
    if (cls != self->tensor || !begin(self, &frame) || hook->gradients != self->gradients)
        return 0;
    if (!integer_of(page, s_number, &number) || number != frame.segment[S_PAGE] || !integer_of(hook->info, s_id, &id))
        return 0;
    const int scaled = truth_of(self->gradients, s_scaled);
    if (scaled < 0 || !is_unseen(self) || !issued_now(self, &seq))
        return 0;
    slots = PyObject_GetAttr(hook->info, s_slots);
    if (slots == NULL || !PyDict_CheckExact(slots))
        goto done;
    Entry *row = next_row(self, &frame, slots, hook->role);
    if (row == NULL || !place_of(self->exchange, gradient, row, &view) || !shape_of(self, &view, &row->shape))
        goto done;
    if (is_counted(&frame, row) || !read_bits(&view, row) || is_near_overflow(self, row) || !take_value(&frame, row))
        goto done;
    row->mark = scaled ? MARK_SCALED : 0;
    if (is_local) {
        if (!integer_of(gradient, s__version, &version))
            goto done;
        PyObject *ref = PyWeakref_NewRef(gradient, NULL);
        memory = ref != NULL ? Py_BuildValue("(NL)", ref, (long long)version) : NULL;
        key = PyLong_FromVoidPtr(gradient);
        if (memory == NULL || key == NULL || PyDict_SetItem(self->local, key, memory) < 0)
            goto done;
    } else if (PyObject_SetAttr(self->gradients, s__page, page) < 0)
        goto done;
    taken = store(self, &frame, id, NOTHING, 0, PHASE_BACKWARD, seq, 0);
    if (taken) {
        volatile int64_t *fields = header(self);
        fields[F_PHASE] = RANK_BACKWARD;
        fields[F_MODULE] = id;
    }
done:
    PyErr_Clear();
    Py_XDECREF(slots);
    Py_XDECREF(key);
    Py_XDECREF(memory);
    clear_frame(&frame);
    return taken;
}

static int one_argument(PyObject *args, PyObject *kwargs)
{
    if (PyTuple_GET_SIZE(args) == 1 && (kwargs == NULL || PyDict_GET_SIZE(kwargs) == 0))
        return 1;
    PyErr_SetString(PyExc_TypeError, "expected one tensor");
    return 0;
}

static PyObject *nothing_of(PyObject *result)
{
    if (result == NULL)
        return NULL;
    Py_DECREF(result);
    Py_RETURN_NONE;
}

static PyObject *output_hook_call(Hook *self, PyObject *args, PyObject *kwargs)
{
    if (!one_argument(args, kwargs))
        return NULL;
    PyObject *gradient = PyTuple_GET_ITEM(args, 0), *page = self->page, *result;
    if (self->taker == NULL || self->info == NULL || self->role == NULL || page == NULL)
        Py_RETURN_NONE;
    Py_INCREF(self);
    Py_INCREF(page);
    if (truth_of(self->gradients, s__attached) == 1 && take_gradient((FrameWriter *)self->taker, self, page, gradient, 0))
        result = Py_NewRef(Py_None);
    else
        result = nothing_of(PyObject_CallMethodObjArgs(self->gradients, s_of_output, self->info, self->role, page,
                                                       gradient, NULL));
    Py_DECREF(page);
    Py_DECREF(self);
    return result;
}

/* Gradients.of_parameter. 1, or 0 if it is left to it */
static int take_parameter(Hook *self, PyObject *parameter)
{
    FrameWriter *taker = (FrameWriter *)self->taker;
    PyObject *gradient = NULL, *before = NULL, *page = NULL, *root = NULL;
    int taken = 0;
    if (truth_of(self->gradients, s__attached) != 1 || truth_of(taker->progress, s_skipped) != 0 || !is_unseen(taker))
        return 0;
    before = PyObject_GetAttr(self->gradients, s_before_parameter);
    if (before != NULL && before != Py_None) {  /* what a compiled backward has left may come first */
        PyObject *done = PyObject_CallOneArg(before, self->info);
        Py_XDECREF(done);
        if (done == NULL)
            goto done;
    }
    gradient = PyObject_GetAttr(parameter, s_grad);
    page = PyObject_GetAttr(self->gradients, s__page);
    if (gradient == NULL || gradient == Py_None || page == NULL)
        goto done;
    if (page == Py_None) {
        root = PyObject_GetAttr(self->info, s_root);
        Py_CLEAR(page);
        page = root != NULL ? PyObject_GetAttr(root, s_page) : NULL;
    }
    if (page != NULL && page != Py_None)
        taken = take_gradient(taker, self, page, gradient, 1);
done:
    PyErr_Clear();
    Py_XDECREF(gradient);
    Py_XDECREF(before);
    Py_XDECREF(page);
    Py_XDECREF(root);
    return taken;
}

static PyObject *parameter_hook_call(Hook *self, PyObject *args, PyObject *kwargs)
{
    if (!one_argument(args, kwargs))
        return NULL;
    PyObject *parameter = PyTuple_GET_ITEM(args, 0), *result;
    if (self->taker == NULL || self->info == NULL || self->role == NULL)
        Py_RETURN_NONE;
    Py_INCREF(self);
    if (take_parameter(self, parameter))
        result = Py_NewRef(Py_None);
    else
        result = nothing_of(PyObject_CallMethodObjArgs(self->gradients, s_of_parameter, self->info, self->role,
                                                       parameter, NULL));
    Py_DECREF(self);
    return result;
}

/* Tensor.register_hook, without the handle that nobody would keep. 0 if it is left to it. */
static int watch_output(FrameWriter *self, PyObject *info, PyObject *role, PyObject *tensor, PyObject *page)
{
    PyObject *hooks = NULL, *function = NULL, *dict = NULL, *number = NULL, *next = NULL, *hook = NULL, *done = NULL;
    PyObject *one = NULL;
    int good = 0;
    hooks = PyObject_GetAttr(tensor, s__backward_hooks);
    if (hooks != Py_None)
        goto end;
    function = PyObject_GetAttr(tensor, s_grad_fn);
    if (function == NULL || function == Py_None)
        goto end;
    dict = PyObject_CallNoArgs(self->hook_dict);
    hook = new_hook(output_hook_type, (PyObject *)self, self->gradients, info, role, page);
    number = PyObject_GetAttr(self->handle, s_next_id);
    one = PyLong_FromLong(1);
    if (dict == NULL || hook == NULL || number == NULL || one == NULL)
        goto end;
    next = PyNumber_Add(number, one);
    if (next == NULL || PyObject_SetAttr(self->handle, s_next_id, next) < 0 || PyObject_SetItem(dict, number, hook) < 0)
        goto end;
    if (PyObject_SetAttr(tensor, s__backward_hooks, dict) < 0)
        goto end;
    done = PyObject_CallMethodObjArgs(function, s__register_hook_dict, tensor, NULL);
    good = done != NULL;
    if (!good) {
        PyErr_Clear();
        if (PyObject_SetAttr(tensor, s__backward_hooks, Py_None) < 0)
            PyErr_Clear();
    }
end:
    PyErr_Clear();
    Py_XDECREF(hooks);
    Py_XDECREF(function);
    Py_XDECREF(dict);
    Py_XDECREF(number);
    Py_XDECREF(next);
    Py_XDECREF(hook);
    Py_XDECREF(done);
    Py_XDECREF(one);
    return good;
}

/* The fresh outputs of a frame that is written: look at their gradients. -1 with an exception set */
static int watch_outputs(FrameWriter *self, Frame *frame, PyObject *info, PyObject *page)
{
    for (int i = 0; i < frame->used; i++) {
        Entry *row = &frame->rows[i];
        if (!row->is_output || !row->is_fresh)
            continue;
        PyObject *tensor = row->object;
        if (truth_of(tensor, s_is_leaf) == 1)
            continue;
        PyObject *role = row->is_output == 1 ? of_output_role : of_outputs[row->is_output - 2];
        if (watch_output(self, info, role, tensor, page))
            continue;
        role = row->is_output == 1 ? output_role : outputs[row->is_output - 2];
        PyObject *done = PyObject_CallMethodObjArgs(self->gradients, s_watch_output, info, role, tensor, page, NULL);
        if (done == NULL)
            return -1;
        Py_DECREF(done);
    }
    return 0;
}

/* -- frames ----------------------------------------------------------------------------------------------------- */

/* Gradients.watch_parameter, unless it has nothing to do: it is watched already, or it needs no gradient */
static int watch_parameter(FrameWriter *self, PyObject *parameter, PyObject *info, PyObject *name)
{
    PyObject *key = PyLong_FromVoidPtr(parameter);
    PyObject *known = key != NULL ? find(self->watched, key) : NULL;
    Py_XDECREF(key);
    PyErr_Clear();
    if (known != NULL && PyTuple_CheckExact(known) && is_ref_to(PyTuple_GET_ITEM(known, 0), parameter))
        return 1;
    if (truth_of(parameter, s_requires_grad) == 0)
        return 1;
    PyObject *done = PyObject_CallMethodObjArgs(self->gradients, s_watch_parameter, parameter, info, name, NULL);
    PyErr_Clear();
    Py_XDECREF(done);
    return done != NULL;
}

static int parameter_rows(FrameWriter *self, Frame *frame, PyObject *info, PyObject *slots, PyObject *module, int64_t step)
{
    PyObject *parameters = PyObject_GetAttr(module, s__parameters), *name, *parameter;
    Py_ssize_t position = 0;
    int good = parameters != NULL && PyDict_CheckExact(parameters);
    while (good && PyDict_Next(parameters, &position, &name, &parameter)) {
        if (parameter == Py_None)
            continue;
        Py_INCREF(name);  /* what is called here could change the dictionary */
        Py_INCREF(parameter);
        good = (PyObject *)Py_TYPE(parameter) == self->parameter &&
               (!self->with_grads || watch_parameter(self, parameter, info, name)) &&
               (!self->with_weights || weight_row(self, frame, slots, name, parameter, step));
        Py_DECREF(name);
        Py_DECREF(parameter);
    }
    Py_XDECREF(parameters);
    return good;
}

static int argument_rows(FrameWriter *self, Frame *frame, PyObject *slots, PyObject *args, PyObject *kwargs)
{
    if (!PyTuple_CheckExact(args) || !PyDict_CheckExact(kwargs) || PyTuple_GET_SIZE(args) > ROLES)
        return 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args); i++)
        if (!leaf_row(self, frame, slots, inputs[i], PyTuple_GET_ITEM(args, i), 0))
            return 0;
    PyObject *key, *leaf;
    Py_ssize_t position = 0;
    while (PyDict_Next(kwargs, &position, &key, &leaf)) {
        PyObject *role = find(self->kwargs, key);
        if (role == NULL || !leaf_row(self, frame, slots, role, leaf, 0))
            return 0;
    }
    return 1;
}

static int output_rows(FrameWriter *self, Frame *frame, PyObject *slots, PyObject *output)
{
    if (!PyTuple_CheckExact(output))
        return leaf_row(self, frame, slots, output_role, output, 1);
    if (PyTuple_GET_SIZE(output) > ROLES)
        return 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(output); i++)
        if (!leaf_row(self, frame, slots, outputs[i], PyTuple_GET_ITEM(output, i), (int)i + 2))
            return 0;
    return 1;
}

static PyObject *answer(int taken)
{
    PyErr_Clear();
    return PyBool_FromLong(taken);
}

static PyObject *taker_frame(FrameWriter *self, PyObject *const *args, Py_ssize_t given)
{
    Frame frame;
    int64_t id, before, seq, numbers[4];
    if (given != 10)
        return wrong("expected frame(info, module, args, kwargs, output, page, parent, depth, phase, step)");
    PyObject *info = args[0], *page = args[5];
    for (int i = 0; i < 4; i++)
        numbers[i] = PyLong_AsLongLong(args[6 + i]);
    if (PyErr_Occurred())
        return NULL;
    if (!begin(self, &frame) || PySet_GET_SIZE(self->waived) || !is_unseen(self))
        return answer(0);
    if (!integer_of(info, s_id, &id) || !integer_of(info, s_seq, &before) || !issued_now(self, &seq))
        return answer(0);
    PyObject *slots = PyObject_GetAttr(info, s_slots);
    int taken = slots != NULL && PyDict_CheckExact(slots) &&
                parameter_rows(self, &frame, info, slots, args[1], numbers[3]) &&
                (!self->forward || (argument_rows(self, &frame, slots, args[2], args[3]) &&
                                    output_rows(self, &frame, slots, args[4]))) &&
                !PyErr_Occurred() && make_memories(self, &frame, numbers[3]) &&
                store(self, &frame, id, numbers[0], numbers[1], numbers[2], seq,
                      before >= 0 && seq > before ? seq - before : 0);
    PyErr_Clear();
    if (taken) {
        remember(self, &frame);
        if (self->with_grads && self->forward && watch_outputs(self, &frame, info, page) < 0) {
            Py_DECREF(slots);
            clear_frame(&frame);
            return NULL;
        }
    }
    Py_XDECREF(slots);
    clear_frame(&frame);
    return answer(taken);
}

static PyObject *taker_weights(FrameWriter *self, PyObject *const *args, Py_ssize_t given)
{
    Frame frame;
    int64_t id, seq;
    if (given != 3 || !PyList_Check(args[1]))
        return wrong("expected weights(info, [(name, parameter), ...], step)");
    PyObject *info = args[0], *list = args[1];
    const int64_t step = PyLong_AsLongLong(args[2]);
    if (PyErr_Occurred())
        return NULL;
    if (!begin(self, &frame) || !is_unseen(self) || !integer_of(info, s_id, &id) || !issued_now(self, &seq))
        return answer(0);
    PyObject *slots = PyObject_GetAttr(info, s_slots);
    int taken = slots != NULL && PyDict_CheckExact(slots);
    for (Py_ssize_t i = 0; taken && i < PyList_GET_SIZE(list); i++) {
        PyObject *pair = PyList_GET_ITEM(list, i);
        taken = PyTuple_CheckExact(pair) && PyTuple_GET_SIZE(pair) == 2 &&
                weight_row(self, &frame, slots, PyTuple_GET_ITEM(pair, 0), PyTuple_GET_ITEM(pair, 1), step);
    }
    taken = taken && !PyErr_Occurred() && make_memories(self, &frame, step) &&
            store(self, &frame, id, NOTHING, 0, PHASE_OPTIMIZER, seq, 0);
    PyErr_Clear();
    if (taken)
        remember(self, &frame);
    Py_XDECREF(slots);
    clear_frame(&frame);
    return answer(taken);
}

/* Gradients.is_local of all of them that there are */
static PyObject *taker_all_local(FrameWriter *self, PyObject *parameters)
{
    if (!PyList_Check(parameters))
        return wrong("expected [(name, parameter), ...]");
    int local = is_unseen(self);
    for (Py_ssize_t i = 0; local && i < PyList_GET_SIZE(parameters); i++) {
        PyObject *pair = PyList_GET_ITEM(parameters, i);
        if (!PyTuple_CheckExact(pair) || PyTuple_GET_SIZE(pair) != 2)
            return answer(0);
        PyObject *gradient = PyObject_GetAttr(PyTuple_GET_ITEM(pair, 1), s_grad);
        if (gradient == NULL)
            return answer(0);
        if (gradient != Py_None) {
            int64_t version;
            PyObject *key = PyLong_FromVoidPtr(gradient);
            PyObject *known = key != NULL ? find(self->local, key) : NULL;
            local = known != NULL && PyTuple_CheckExact(known) && PyTuple_GET_SIZE(known) == 2 &&
                    is_ref_to(PyTuple_GET_ITEM(known, 0), gradient) && integer_of(gradient, s__version, &version) &&
                    item(known, 1) == version;
            Py_XDECREF(key);
        }
        Py_DECREF(gradient);
    }
    return answer(local);
}

static PyObject *taker_watch(FrameWriter *self, PyObject *const *args, Py_ssize_t given)
{
    if (given != 3 && given != 2)
        return wrong("expected hook(info, role[, page])");
    return new_hook(given == 3 ? output_hook_type : parameter_hook_type, (PyObject *)self, self->gradients, args[0],
                    args[1], given == 3 ? args[2] : NULL);
}

/* -- a look from inside of a compiled graph: worker/compile/graph_op.py ---------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    PyObject *seen, *cls, *numbers, *tensor, *otherwise;
    const Exchange *exchange;
} Look;

/* 1 when it was an ordinary tensor; else 0, with no exception set */
static int look_at(Look *self, PyObject *tensor, PyObject *place)
{
    Entry row;
    DLTensor view;
    memset(&row, 0, sizeof row);
    const Py_ssize_t position = PyLong_CheckExact(place) ? PyLong_AsSsize_t(place) : -1;
    if (position < 0 || position >= PyList_GET_SIZE(self->seen) || (PyObject *)Py_TYPE(tensor) != self->tensor ||
        !place_of(self->exchange, tensor, &row, &view) || !read_bits(&view, &row)) {
        PyErr_Clear();
        return 0;
    }
    PyTypeObject *type = (PyTypeObject *)self->cls;
    PyObject *seen = type->tp_alloc(type, 2), *numbers = numbers_of((PyTypeObject *)self->numbers, &row);
    PyObject *dims = dims_of(&view);
    if (seen == NULL || numbers == NULL || dims == NULL) {
        PyErr_Clear();
        Py_XDECREF(seen);
        Py_XDECREF(numbers);
        Py_XDECREF(dims);
        return 0;
    }
    PyTuple_SET_ITEM(seen, 0, numbers);
    PyTuple_SET_ITEM(seen, 1, dims);
    if (PyList_SetItem(self->seen, position, seen) < 0)
        PyErr_Clear();
    return 1;
}

static PyObject *look_call(Look *self, PyObject *args, PyObject *kwargs)
{
    if (PyTuple_GET_SIZE(args) == 3 && (kwargs == NULL || PyDict_GET_SIZE(kwargs) == 0) &&
        look_at(self, PyTuple_GET_ITEM(args, 0), PyTuple_GET_ITEM(args, 2)))
        Py_RETURN_NONE;
    return PyObject_Call(self->otherwise, args, kwargs);
}

static int look_traverse(Look *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->seen);
    Py_VISIT(self->cls);
    Py_VISIT(self->numbers);
    Py_VISIT(self->tensor);
    Py_VISIT(self->otherwise);
    return 0;
}

static int look_clear(Look *self)
{
    Py_CLEAR(self->seen);
    Py_CLEAR(self->cls);
    Py_CLEAR(self->numbers);
    Py_CLEAR(self->tensor);
    Py_CLEAR(self->otherwise);
    return 0;
}

static void look_dealloc(Look *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    look_clear(self);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

/* The table of DLPack in a capsule, if it is a version that is known here; else NULL with an exception set */
static const Exchange *exchange_of(PyObject *capsule)
{
    const Exchange *exchange = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    if (exchange != NULL && (exchange->header.version.major != 1 || exchange->view == NULL)) {
        PyErr_SetString(PyExc_ValueError, "another version of DLPack");
        return NULL;
    }
    return exchange;
}

static PyObject *look_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"exchange", "seen", "cls", "numbers", "tensor", "otherwise", NULL};
    PyObject *exchange;
    Look *self = (Look *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    const int parsed = PyArg_ParseTupleAndKeywords(args, kwargs, "OO!O!O!OO", names, &exchange, &PyList_Type, &self->seen,
                                                   &PyType_Type, &self->cls, &PyType_Type, &self->numbers,
                                                   &self->tensor, &self->otherwise);
    Py_XINCREF(self->seen);
    Py_XINCREF(self->cls);
    Py_XINCREF(self->numbers);
    Py_XINCREF(self->tensor);
    Py_XINCREF(self->otherwise);
    if (!parsed || (self->exchange = exchange_of(exchange)) == NULL) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static int taker_traverse(FrameWriter *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
#define VISIT(NAME) Py_VISIT(self->NAME);
    EACH_OBJECT(VISIT)
    return 0;
}

static int taker_clear(FrameWriter *self)
{
    if (self->cell.obj != NULL)
        PyBuffer_Release(&self->cell);
    self->cell.buf = NULL;
#define CLEAR(NAME) Py_CLEAR(self->NAME);
    EACH_OBJECT(CLEAR)
    return 0;
}

static void taker_dealloc(FrameWriter *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    taker_clear(self);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

static int expect(PyObject *object, int right, const char *expected)
{
    if (object != NULL && !right)
        PyErr_SetString(PyExc_TypeError, expected);
    return object != NULL && right;
}

static PyObject *taker_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
#define NAME_OF(NAME) #NAME,
    static char *names[] = {EACH_OBJECT(NAME_OF) "exchange", "near", "forward", "with_weights", "with_grads", NULL};
    PyObject *exchange, *near;
    Py_buffer memory;
    FrameWriter *self = (FrameWriter *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
#define PLACE_OF(NAME) &self->NAME,
#define HOLD(NAME) Py_XINCREF(self->NAME);
    const int parsed = PyArg_ParseTupleAndKeywords(args, kwargs, "OOOOOOOOOOOOOOOOOOOOOOOppp", names,
                                                   EACH_OBJECT(PLACE_OF) &exchange, &near, &self->forward,
                                                   &self->with_weights, &self->with_grads);
    EACH_OBJECT(HOLD)
    if (!parsed)
        goto failed;
#define IS_DICT(NAME) expect(self->NAME, PyDict_CheckExact(self->NAME), #NAME " is to be a dict")
    if (!IS_DICT(seen) || !IS_DICT(by_memory) || !IS_DICT(weights) || !IS_DICT(shapes) || !IS_DICT(ignored) ||
        !IS_DICT(watched) || !IS_DICT(local) || !IS_DICT(kwargs) || !IS_DICT(compiler) ||
        !expect(self->waived, PySet_Check(self->waived), "waived is to be a set") ||
        !expect(self->numbers, PyType_Check(self->numbers), "numbers is to be a class") ||
        !expect(near, PyDict_Check(near), "near is to be a dict"))
        goto failed;
    for (int code = 0; code < 5; code++) {
        long long from = INT64_MAX, to = 0;
        PyObject *key = PyLong_FromLong(code);
        PyObject *limits = key != NULL ? PyDict_GetItemWithError(near, key) : NULL;
        Py_XDECREF(key);
        if (PyErr_Occurred() || (limits != NULL && !PyArg_ParseTuple(limits, "LL", &from, &to)))
            goto failed;
        self->near[code] = from;
        self->largest[code] = to;
    }
    self->exchange = exchange_of(exchange);
    if (self->exchange == NULL)
        goto failed;
    if (PyObject_GetBuffer(self->memory, &memory, PyBUF_WRITABLE) < 0)
        goto failed;
    /* Not kept: a map whose memory is lent could not be closed. When it is, the cursor is -1. */
    self->base = memory.buf;
    PyBuffer_Release(&memory);
    if (PyObject_GetBuffer(self->cursor, &self->cell, PyBUF_WRITABLE) < 0)
        goto failed;
    if (self->cell.len < (Py_ssize_t)sizeof(int64_t)) {
        PyErr_SetString(PyExc_ValueError, "no room in the cursor");
        goto failed;
    }
    return (PyObject *)self;
failed:
    Py_DECREF(self);
    return NULL;
}

#define METHOD(FUNCTION) (PyCFunction)(void (*)(void))FUNCTION
static PyMethodDef taker_methods[] = {
    {"frame", METHOD(taker_frame), METH_FASTCALL,
     "frame(info, module, args, kwargs, output, page, parent, depth, phase, step) -> bool\n\n"
     "Write the frame of a module call into `page`, which is open; False if it is not an ordinary one."},
    {"weights", METHOD(taker_weights), METH_FASTCALL,
     "weights(info, [(name, parameter), ...], step) -> bool\n\n"
     "Write the frame of a module's weights after an optimizer step; False if it is not an ordinary one."},
    {"all_local", METHOD(taker_all_local), METH_O,
     "all_local([(name, parameter), ...]) -> bool\n\nWhether all gradients that there are were looked at, and are as "
     "they were."},
    {"hook", METHOD(taker_watch), METH_FASTCALL,
     "hook(info, role[, page]) -> hook\n\nThe hook for the gradient of an output, or without a page of a parameter."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot taker_slots[] = {
    {Py_tp_doc, "Writes what nearly all frames and gradients are: plain contiguous float tensors in host memory that\n"
                "are finite and not near overflow, and what is known of the others already. For anything else, all\n"
                "of it answers False, and has written nothing."},
    {Py_tp_new, taker_new}, {Py_tp_dealloc, taker_dealloc}, {Py_tp_traverse, taker_traverse},
    {Py_tp_clear, taker_clear}, {Py_tp_methods, taker_methods}, {0, NULL},
};

static PyMemberDef hook_members[] = {
    {"gradients", T_OBJECT, offsetof(Hook, gradients), READONLY, NULL},
    {"info", T_OBJECT, offsetof(Hook, info), 0, NULL},
    {"role", T_OBJECT, offsetof(Hook, role), 0, NULL},
    {"page", T_OBJECT, offsetof(Hook, page), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

#define HOOK_SLOTS(CALL)                                                                              \
    {Py_tp_call, CALL}, {Py_tp_dealloc, hook_dealloc}, {Py_tp_traverse, hook_traverse},               \
    {Py_tp_clear, hook_clear}, {Py_tp_members, hook_members}, {0, NULL}
static PyType_Slot output_hook_slots[] = {HOOK_SLOTS(output_hook_call)};
static PyType_Slot parameter_hook_slots[] = {HOOK_SLOTS(parameter_hook_call)};

static PyType_Slot look_slots[] = {
    {Py_tp_doc, "Look(exchange, seen, cls, numbers, tensor, otherwise)\n\n"
                "Called with (tensor, token, place), it puts what it sees of an ordinary tensor into seen[place]; of any\n"
                "other, `otherwise` is called."},
    {Py_tp_new, look_new}, {Py_tp_call, look_call}, {Py_tp_dealloc, look_dealloc}, {Py_tp_traverse, look_traverse},
    {Py_tp_clear, look_clear}, {0, NULL},
};

#define FLAGS (Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC)
#define NO_NEW (FLAGS | Py_TPFLAGS_DISALLOW_INSTANTIATION)
static PyType_Spec taker_spec = {"gpuwatch.worker.native.core.FrameWriter", sizeof(FrameWriter), 0, FLAGS, taker_slots};
static PyType_Spec look_spec = {"gpuwatch.worker.native.core.Look", sizeof(Look), 0, FLAGS, look_slots};
static PyType_Spec output_spec = {"gpuwatch.worker.native.core.OutputHook", sizeof(Hook), 0, NO_NEW, output_hook_slots};
static PyType_Spec parameter_spec = {"gpuwatch.worker.native.core.ParameterHook", sizeof(Hook), 0, NO_NEW, parameter_hook_slots};

static int make_names(void)
{
#define INTERN(NAME)                                            \
    if ((s_##NAME = PyUnicode_InternFromString(#NAME)) == NULL) \
        return -1;
    EACH_NAME(INTERN)
    output_role = PyUnicode_InternFromString("output");
    of_output_role = PyUnicode_InternFromString("grad output");
    if (output_role == NULL || of_output_role == NULL)
        return -1;
    for (int i = 0; i < ROLES; i++) {
        inputs[i] = PyUnicode_FromFormat("input[%d]", i);
        outputs[i] = PyUnicode_FromFormat("output[%d]", i);
        of_outputs[i] = PyUnicode_FromFormat("grad output[%d]", i);
        if (inputs[i] == NULL || outputs[i] == NULL || of_outputs[i] == NULL)
            return -1;
    }
    return 0;
}

static PyTypeObject *add_type(PyObject *module, const char *name, PyType_Spec *spec)
{
    PyObject *type = PyType_FromSpec(spec);
    if (type == NULL || PyObject_SetAttrString(type, "__torch_unserializable__", Py_True) < 0 ||
        PyObject_SetAttrString(module, name, type) < 0) {
        Py_XDECREF(type);
        return NULL;
    }
    return (PyTypeObject *)type;  /* ours is the reference that the static variable holds */
}

/* What has to be as core/recorder/layout.py and rows.py have it. */
static PyObject *layout(void)
{
    return Py_BuildValue("(iiiiiiiiii)", FRAME_BYTES, ROW_BYTES, VALUE_BYTES, FRAMES_PER_SEGMENT, ROWS_PER_SEGMENT,
                         VALUES_PER_SEGMENT, SEGMENT_HEADER, ROWS_AT, VALUES_AT,
                         COUNT_EVERY);
}

static int add_taker(PyObject *module)
{
    PyObject *numbers = layout();
    if (numbers == NULL || PyObject_SetAttrString(module, "LAYOUT", numbers) < 0) {
        Py_XDECREF(numbers);
        return -1;
    }
    Py_DECREF(numbers);
    PyTypeObject *taker = add_type(module, "FrameWriter", &taker_spec), *look = add_type(module, "Look", &look_spec);
    Py_XDECREF(taker);
    Py_XDECREF(look);
    output_hook_type = add_type(module, "OutputHook", &output_spec);
    parameter_hook_type = add_type(module, "ParameterHook", &parameter_spec);
    return taker == NULL || look == NULL || output_hook_type == NULL || parameter_hook_type == NULL ? -1 : make_names();
}

static PyMethodDef methods[] = {
    {"extremes", (PyCFunction)(void (*)(void))extremes, METH_FASTCALL,
     "extremes(address, count, bytes) -> (low, high)\n\n"
     "Smallest and largest of `count` signed integers of `bytes` bytes each, the sign bit cleared. Raises TypeError."},
    {"below", (PyCFunction)(void (*)(void))below, METH_FASTCALL,
     "below(address, count, bytes, limit) -> (zeros, small)\n\n"
     "How many are zero, and how many below `limit` (zeros too), the sign bit cleared. Raises TypeError."},
    {"use_threads", (PyCFunction)(void (*)(void))use_threads, METH_FASTCALL,
     "use_threads(parallel, most, is_parallel, thread, team) -> None\n\n"
     "Read large tensors with the threads of the OpenMP whose functions GOMP_parallel, omp_get_max_threads,\n"
     "omp_in_parallel, omp_get_thread_num and omp_get_num_threads are at these addresses; without any: with none."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "core", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_core(void)
{
#if defined(__GNUC__) && defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2"))
        width = 1;
    if (width && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq"))
        width = 2;
#endif
    PyObject *module = PyModule_Create(&definition);
    if (module != NULL && add_taker(module) < 0)
        Py_CLEAR(module);
    return module;
}
