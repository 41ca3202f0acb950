/* Small helpers over Python objects, and the strings that are looked up in every call. */

#ifndef GPUWATCH_OBJECTS_H
#define GPUWATCH_OBJECTS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

#include "errors.h"

#define EACH_NAME(DO)                                                                                              \
    DO(id) DO(seq) DO(root) DO(page) DO(slots) DO(number) DO(skipped) DO(grad) DO(scaled) DO(rehearses) DO(grad_fn)   \
    DO(next_id) DO(_version) DO(_parameters) DO(_backward_hooks) DO(_register_hook_dict) DO(_attached) DO(_page)    \
    DO(before_parameter) DO(requires_grad) DO(watch_output) DO(watch_parameter) DO(of_output) DO(of_parameter)      \
    DO(_is_compiling_flag) DO(untyped_storage) DO(data_ptr) DO(rootRank)                                   \
    DO(_get_sequence_number_for_group) DO(is_neg) DO(is_nested) DO(is_quantized) DO(is_meta) DO(is_inference) DO(_has_storage) \
    DO(_len_torch_function_stack) DO(packed) DO(rank) DO(name) DO(value) \
    DO(input_tensors) DO(output_tensors) DO(waits) DO(acquire) DO(release) DO(dtype) DO(get_device) DO(two) DO(_post_accumulate_grad_hooks) \
    DO(device_buffer) DO(late_pages) DO(_recorder) DO(_seq) DO(_send_after_collectives) DO(_unsent) DO(dlpack_type)   \
    DO(_driver) DO(is_capturing) DO(raw_stream) DO(current_device) DO(_buffers) DO(_buffer) DO(device) DO(rows)       \
    DO(is_busy) DO(takes) DO(positions) DO(_queued) DO(_queued_page) DO(_together) DO(_may_wait) DO(reads) DO(buffer) DO(place)               \
    DO(weights) DO(remembered) DO(waiting) DO(held) DO(hold) DO(read_rest) DO(keep)            \
    DO(groups) DO(table) DO(silent) DO(messages) DO(received) DO(_pg_map)
#define DECLARE_NAME(NAME) extern PyObject *s_##NAME;
EACH_NAME(DECLARE_NAME)

enum { ROLES = 16 };
extern PyObject *input_roles[ROLES], *output_roles[ROLES], *grad_output_roles[ROLES], *output_role, *grad_output_role;

/* Make all of the above. -1 with an exception set. */
int make_names(void);

/* Set a TypeError; returns NULL. */
PyObject *wrong(const char *expected);

/* Whether a weak reference is to `object`, and whether its object is alive. */
int is_ref_to(PyObject *ref, PyObject *object);
int is_alive(PyObject *ref);

/* The object of a weak reference; NULL, with no exception set, if it is gone. */
PyObject *object_of(PyObject *ref);

/* An integer, and an attribute that is one. 0 if it is not, with no exception set: the Python path will say why. */
int integer_from(PyObject *object, int64_t *number);
int integer_of(PyObject *object, PyObject *name, int64_t *number);

/* An attribute that is True or False: 1, 0, or -1 for anything else, with no exception set. */
int truth_of(PyObject *object, PyObject *name);

/* Whether a call has returned `answer`, which is one of a kind, as True is. Gives the result up, with no exception set. */
int is_answer(PyObject *result, PyObject *answer);

/* Append an item, which it takes over and which may be NULL. 0 with an exception set. */
int append(PyObject *list, PyObject *item);

/* Whether a call has returned: its result is given up. 0 with an exception set. */
int was_done(PyObject *result);

/* Fill a new tuple with integers from `start` on. Returns the tuple, or NULL with an exception set if there is no memory.
   `tuple` may be NULL. Py_BuildValue reads its format twice and takes three times as long. */
PyObject *with_integers(PyObject *tuple, Py_ssize_t start, const int64_t *numbers, Py_ssize_t count);

/* Borrowed; NULL with no exception set. It is valid until the GIL may be released or Python is called: then another
   thread may take the item out of the dictionary, and with it the last reference. Keys are integers, strings or tuples of
   these, whose comparison runs no Python. */
static inline PyObject *find(PyObject *dict, PyObject *key)
{
    PyObject *found = PyDict_GetItemWithError(dict, key);
    if (found == NULL)
        drop_error();
    return found;
}

/* An integer of a tuple that gpuwatch itself has made: it fits, or an exception is set, for which the caller asks later. */
static inline int64_t item(PyObject *tuple, Py_ssize_t position)
{
    return PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, position));
}

#endif
