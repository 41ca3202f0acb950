/* Where the tensors are that a launch on a device reads: GroupedReadings._entry of worker/device/grouped_readings.py for
   ordinary tensors and weights. */

#include "readings.h"

#include <string.h>

#include "layout.h"
#include "objects.h"
#include "tensor_view.h"

enum { ENTRY = 8, SIZE_OF_ROW = 3 * 8 };

/* The address of earlier numbers: from (Packed(rows, address), number); -1 if it is another object. */
static int64_t address_of(PyObject *earlier)
{
    int64_t address, number;
    if (!PyTuple_CheckExact(earlier) || PyTuple_GET_SIZE(earlier) != 2)
        return -1;
    PyObject *packed = PyTuple_GET_ITEM(earlier, 0);
    if (!PyTuple_Check(packed) || PyTuple_GET_SIZE(packed) != 2 || !integer_from(PyTuple_GET_ITEM(packed, 1), &address) ||
        !integer_from(PyTuple_GET_ITEM(earlier, 1), &number))
        return -1;
    return address + number * SIZE_OF_ROW;
}

/* The tensor of a known weight, (ref, version, step, row), or None if it is gone or was changed since. A new reference. */
static PyObject *unchanged(PyObject *known)
{
    int64_t version, then;
    PyObject *tensor = object_of(PyTuple_GET_ITEM(known, 0));
    if (tensor == NULL)
        return Py_NewRef(Py_None);
    if (!integer_of(tensor, s__version, &version))
        version = -1; /* an inference tensor, which counts no changes */
    if (integer_from(PyTuple_GET_ITEM(known, 1), &then) && version == then)
        return tensor;
    Py_DECREF(tensor);
    return Py_NewRef(Py_None);
}

static int is_known(PyObject *item)
{
    return PyTuple_Check(item) && PyTuple_GET_SIZE(item) == 4 && PyWeakref_CheckRef(PyTuple_GET_ITEM(item, 0));
}

/* What does not change from entry to entry. */
typedef struct {
    const Exchange *exchange;
    PyObject *types, *tensors, *earlier;
    int64_t device_type, device_id; /* of the rows: a tensor that has moved to another device since is not read */
} Launched;

/* Whether a weight lies where it lay when its elements were found to be in its storage, and is no longer. `row`: its
   DeviceRow, or another object. A storage that becomes smaller moves. */
static int lies_as_before(PyObject *row, const TensorView *view)
{
    int64_t address, bytes;
    PyObject *place = PyObject_GetAttr(row, s_place);
    const int same = place != NULL && PyTuple_CheckExact(place) && PyTuple_GET_SIZE(place) == 2 && is_simple(view) &&
                     integer_from(PyTuple_GET_ITEM(place, 0), &address) &&
                     integer_from(PyTuple_GET_ITEM(place, 1), &bytes) &&
                     address == (int64_t)(intptr_t)view->address && bytes_of(view) <= bytes;
    Py_XDECREF(place);
    drop_error();
    return same;
}

/* Fill the entry of a tensor; 0 if Python must do it. `row`: of a known weight, or NULL. `tensor` becomes None if a known
   weight is on another device. */
static int fill_tensor(const Launched *launched, PyObject **tensor, PyObject *row, int counted, int64_t *entry)
{
    TensorView view;
    PyObject *type = (PyObject *)Py_TYPE(*tensor);
    if ((type != PyTuple_GET_ITEM(launched->types, 0) && type != PyTuple_GET_ITEM(launched->types, 1)) ||
        !view_of(launched->exchange, *tensor, &view))
        return 0;
    if (view.dl.device.type != launched->device_type || view.dl.device.id != launched->device_id) {
        Py_SETREF(*tensor, Py_NewRef(Py_None));
        return row != NULL;
    }
    entry[0] = view.dtype;
    entry[1] = counted && (view.dtype == DTYPE_FLOAT16 || view.dtype == DTYPE_BFLOAT16);
    entry[3] = (int64_t)(intptr_t)view.address;
    const int checked = row != NULL && lies_as_before(row, &view);
    entry[4] = entry[5] = checked ? view.count : elements_in_order(*tensor, &view);
    return entry[4] != 0;
}

/* Fill the entry of an item, and append what it is about; 0 if Python must do it. */
static int fill(const Launched *launched, PyObject *item, int counted, int64_t *entry)
{
    PyObject *row = is_known(item) ? PyTuple_GET_ITEM(item, 3) : NULL;
    PyObject *earlier = row != NULL ? PyObject_GetAttr(row, s_packed) : Py_NewRef(Py_None);
    PyObject *tensor = row != NULL ? unchanged(item) : Py_NewRef(item);
    entry[7] = earlier != NULL && earlier != Py_None ? address_of(earlier) : 0;
    entry[6] = 0;
    int good = earlier != NULL && entry[7] >= 0 &&
               (tensor == Py_None || fill_tensor(launched, &tensor, row, counted, entry));
    if (good && tensor == Py_None) {
        entry[0] = DTYPE_FLOAT32;
        entry[1] = entry[3] = entry[4] = entry[5] = 0;
    }
    good = good && PyList_Append(launched->tensors, tensor) == 0 && PyList_Append(launched->earlier, earlier) == 0;
    Py_XDECREF(earlier);
    Py_XDECREF(tensor);
    return good;
}

/* The items of a Waiting, (items, first, counted), borrowed; NULL for another object. */
static PyObject *items_of(PyObject *waiting)
{
    if (!PyTuple_Check(waiting) || PyTuple_GET_SIZE(waiting) != 3 || !PyList_Check(PyTuple_GET_ITEM(waiting, 0)))
        return NULL;
    return PyTuple_GET_ITEM(waiting, 0);
}

/* Fill the entries of one Waiting. Returns their number; -1 if Python must do it, and nothing was
   appended. */
static Py_ssize_t fill_waiting(const Launched *launched, PyObject *waiting, int64_t *entries, Py_ssize_t room)
{
    const Py_ssize_t before = PyList_GET_SIZE(launched->tensors);
    PyObject *items = items_of(waiting);
    int64_t first;
    if (items == NULL || !integer_from(PyTuple_GET_ITEM(waiting, 1), &first))
        return -1;
    const int counted = PyTuple_GET_ITEM(waiting, 2) == Py_True;
    Py_ssize_t number = 0;
    for (int good = 1; number < PyList_GET_SIZE(items); number++, entries += ENTRY) {
        PyObject *item = Py_NewRef(PyList_GET_ITEM(items, number)); /* fill asks torch and Python, and the list may change */
        entries[2] = first + number;
        good = number < room && fill(launched, item, counted, entries);
        Py_DECREF(item);
        if (!good) {
            drop_error();
            if (PyList_SetSlice(launched->tensors, before, PY_SSIZE_T_MAX, NULL) < 0 ||
                PyList_SetSlice(launched->earlier, before, PY_SSIZE_T_MAX, NULL) < 0)
                drop_error();
            return -1;
        }
    }
    return number;
}

PyObject *readings(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    (void)module;
    if (given != 8 || !PyTuple_Check(args[1]) || PyTuple_GET_SIZE(args[1]) != 2 || !PyList_Check(args[2]) ||
        !PyList_Check(args[4]) || !PyList_Check(args[5]))
        return wrong("expected readings(exchange, types, [waiting, ...], at, tensors, earlier, device type, device id)");
    const Launched launched = {exchange_of(args[0]),         args[1], args[4], args[5], PyLong_AsLongLong(args[6]),
                               PyLong_AsLongLong(args[7])};
    Py_ssize_t at = PyLong_AsSsize_t(args[3]), used = 0, room = 0;
    if (PyErr_Occurred())
        return NULL;
    for (Py_ssize_t i = at; i >= 0 && i < PyList_GET_SIZE(args[2]); i++) {
        PyObject *items = items_of(PyList_GET_ITEM(args[2], i));
        room += items != NULL ? PyList_GET_SIZE(items) : 0;
    }
    const Py_ssize_t size = ENTRY * (Py_ssize_t)sizeof(int64_t);
    PyObject *entries = PyBytes_FromStringAndSize(NULL, room * size);
    if (entries == NULL)
        return NULL;
    for (; at >= 0 && at < PyList_GET_SIZE(args[2]); at++) {
        PyObject *waiting = Py_NewRef(PyList_GET_ITEM(args[2], at));
        int64_t *next = (int64_t *)(PyBytes_AS_STRING(entries) + used * size);
        const Py_ssize_t filled = fill_waiting(&launched, waiting, next, room - used);
        Py_DECREF(waiting);
        if (filled < 0)
            break;
        used += filled;
    }
    if (_PyBytes_Resize(&entries, used * size) < 0) /* allowed while nobody else has seen the bytes; it frees them if it fails */
        return NULL;
    return settled(Py_BuildValue("(Nn)", entries, at));
}

/* -- tables ------------------------------------------------------------------------------------------------------- */

enum { MOST_VARIANTS = VALUES_PER_SEGMENT };

typedef struct {
    int64_t variant, share, programs, tensors;
} Launch;

static int64_t variant_of(const int64_t *entry)
{
    const int64_t layout = entry[6] == 0 ? 0 : entry[4] < (INT64_C(1) << 31) ? 1 : 2;
    return entry[0] << 8 | layout << 3 | entry[1] << 2 | (entry[3] % 16 == 0) << 1 | (entry[7] != 0);
}

/* The launch of a variant, a new one at the end; NULL with an exception set. */
static Launch *launch_of(Launch *launches, int *used, int64_t variant, PyObject *share_of)
{
    for (int i = 0; i < *used; i++)
        if (launches[i].variant == variant)
            return &launches[i];
    PyObject *number = PyLong_FromLongLong(variant);
    PyObject *share = number != NULL ? PyObject_CallOneArg(share_of, number) : NULL;
    Launch *new = &launches[*used < MOST_VARIANTS ? *used : 0];
    *new = (Launch){.variant = variant, .share = share != NULL ? PyLong_AsLongLong(share) : -1};
    Py_XDECREF(number);
    Py_XDECREF(share);
    if (!PyErr_Occurred() && (new->share < 1 || *used == MOST_VARIANTS))
        PyErr_SetString(PyExc_ValueError, "too many variants, or an empty share");
    *used += *used < MOST_VARIANTS;
    return PyErr_Occurred() ? NULL : new;
}

/* Append an entry to the table of its launch, and put its earlier numbers into the list. */
static void put_entry(const int64_t *entry, Launch *launch, int64_t most, int64_t *table, int64_t *kept)
{
    const int64_t asked = (entry[4] + launch->share - 1) / launch->share;
    const int64_t programs = asked < 1 ? 1 : asked > most ? most : asked;
    const int64_t found[ENTRY] = {launch->programs, programs, entry[3], entry[2],
                                  entry[4],         entry[5], entry[6], entry[3] != 0 ? entry[2] : 0};
    kept[entry[2]] = entry[7];
    memcpy(table + ENTRY * launch->tensors++, found, sizeof found);
    launch->programs += programs;
}

/* [(variant, programs, table), ...], or NULL with an exception set */
static PyObject *tables_of(const int64_t *entries, Py_ssize_t number, PyObject *share_of, int64_t most, int64_t *kept)
{
    Launch launches[MOST_VARIANTS];
    int used = 0;
    PyObject *all = PyList_New(0);
    int64_t *table = PyMem_Malloc((size_t)(number + 1) * ENTRY * sizeof *table);
    int good = all != NULL && table != NULL;
    for (Py_ssize_t i = 0; good && i < number; i++)
        good = launch_of(launches, &used, variant_of(entries + ENTRY * i), share_of) != NULL;
    for (int at = 0; good && at < used; at++) {
        Launch *launch = &launches[at];
        for (Py_ssize_t i = 0; i < number; i++)
            if (variant_of(entries + ENTRY * i) == launch->variant)
                put_entry(entries + ENTRY * i, launch, most, table, kept);
        PyObject *one = Py_BuildValue("(LLy#)", (long long)launch->variant, (long long)launch->programs, table,
                                      (Py_ssize_t)(launch->tensors * ENTRY * (int64_t)sizeof *table));
        good = one != NULL && PyList_Append(all, one) == 0;
        Py_XDECREF(one);
    }
    PyMem_Free(table);
    if (!good) {
        Py_CLEAR(all);
        if (!PyErr_Occurred())
            PyErr_NoMemory();
    }
    return all;
}

PyObject *tables(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    (void)module;
    if (given != 4 || !PyBytes_Check(args[0]))
        return wrong("expected tables(entries, share_of, most, rows)");
    const int64_t *entries = (int64_t *)PyBytes_AS_STRING(args[0]);
    const Py_ssize_t number = PyBytes_GET_SIZE(args[0]) / (Py_ssize_t)(ENTRY * sizeof *entries);
    const int64_t most = PyLong_AsLongLong(args[2]), rows = PyLong_AsLongLong(args[3]);
    for (Py_ssize_t i = 0; i < number && !PyErr_Occurred(); i++)
        if (entries[ENTRY * i + 2] < 0 || entries[ENTRY * i + 2] >= rows)
            PyErr_SetString(PyExc_ValueError, "a position is not in the list");
    if (PyErr_Occurred())
        return NULL;
    PyObject *kept = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(rows * (int64_t)sizeof *entries));
    if (kept == NULL)
        return NULL;
    memset(PyBytes_AS_STRING(kept), 0, (size_t)PyBytes_GET_SIZE(kept));
    PyObject *all = tables_of(entries, number, args[1], most, (int64_t *)PyBytes_AS_STRING(kept));
    if (all == NULL) {
        Py_DECREF(kept);
        return NULL;
    }
    return Py_BuildValue("(NN)", kept, all);
}
