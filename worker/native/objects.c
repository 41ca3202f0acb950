/* Small helpers over Python objects. */

#include "objects.h"

#define DEFINE_NAME(NAME) PyObject *s_##NAME;
EACH_NAME(DEFINE_NAME)
PyObject *input_roles[ROLES], *output_roles[ROLES], *grad_output_roles[ROLES], *output_role, *grad_output_role;

int make_names(void)
{
#define INTERN(NAME)                                            \
    if ((s_##NAME = PyUnicode_InternFromString(#NAME)) == NULL) \
        return -1;
    EACH_NAME(INTERN)
    output_role = PyUnicode_InternFromString("output");
    grad_output_role = PyUnicode_InternFromString("grad output");
    if (output_role == NULL || grad_output_role == NULL)
        return -1;
    for (int i = 0; i < ROLES; i++) {
        input_roles[i] = PyUnicode_FromFormat("input[%d]", i);
        output_roles[i] = PyUnicode_FromFormat("output[%d]", i);
        grad_output_roles[i] = PyUnicode_FromFormat("grad output[%d]", i);
        if (input_roles[i] == NULL || output_roles[i] == NULL || grad_output_roles[i] == NULL)
            return -1;
    }
    return 0;
}

PyObject *wrong(const char *expected)
{
    PyErr_SetString(PyExc_TypeError, expected);
    return NULL;
}

/* The object of a weak reference, borrowed: another owner holds it, or it is only compared. NULL if it is gone. No other thread
   can drop the last reference before the caller has taken one of its own: the GIL is held, and nothing is
   called. 3.13 deprecates PyWeakref_GetObject, which borrows, because that does not hold without the lock. */
static PyObject *referent(PyObject *ref)
{
    if (!PyWeakref_CheckRef(ref))
        return NULL;
#if PY_VERSION_HEX >= 0x030D0000
    PyObject *found = NULL;
    if (PyWeakref_GetRef(ref, &found) < 0)
        drop_error();
    Py_XDECREF(found);
    return found;
#else
    PyObject *found = PyWeakref_GetObject(ref);
    return found == Py_None ? NULL : found;
#endif
}

/* An address alone does not tell an object: CPython gives the memory of one that is gone to the next. So tables here hold a weak
   reference beside each address, or beside an id(). */
int is_ref_to(PyObject *ref, PyObject *object)
{
    return referent(ref) == object;
}

int is_alive(PyObject *ref)
{
    return referent(ref) != NULL;
}

int is_answer(PyObject *result, PyObject *answer)
{
    const int is = result == answer;
    Py_XDECREF(result);
    drop_error();
    return is;
}

PyObject *object_of(PyObject *ref)
{
    return Py_XNewRef(referent(ref));
}

int integer_of(PyObject *object, PyObject *name, int64_t *number)
{
    PyObject *found = PyObject_GetAttr(object, name);
    if (found == NULL) {
        drop_error();
        return 0;
    }
    const int good = integer_from(found, number);
    Py_DECREF(found);
    return good;
}

int integer_from(PyObject *object, int64_t *number)
{
    *number = PyLong_Check(object) ? PyLong_AsLongLong(object) : -1; /* -1 is a number, too: only PyErr_Occurred tells */
    if (*number != -1 || !PyErr_Occurred())
        return PyLong_Check(object);
    drop_error();
    return 0;
}

int truth_of(PyObject *object, PyObject *name)
{
    PyObject *found = PyObject_GetAttr(object, name);
    if (found == NULL) {
        drop_error();
        return -1;
    }
    const int truth = found == Py_True ? 1 : found == Py_False ? 0 : -1; /* PyObject_IsTrue could call __bool__ of a tensor */
    Py_DECREF(found);
    return truth;
}

int append(PyObject *list, PyObject *item)
{
    const int good = item != NULL && PyList_Append(list, item) == 0;
    Py_XDECREF(item);
    return good;
}

int was_done(PyObject *result)
{
    Py_XDECREF(result);
    return result != NULL;
}

PyObject *with_integers(PyObject *tuple, Py_ssize_t start, const int64_t *numbers, Py_ssize_t count)
{
    for (Py_ssize_t i = 0; tuple != NULL && i < count; i++) {
        PyObject *number = PyLong_FromLongLong(numbers[i]);
        if (number == NULL)
            Py_CLEAR(tuple);
        else
            PyTuple_SET_ITEM(tuple, start + i, number); /* takes the reference over; only for a tuple that nobody else has seen */
    }
    return tuple;
}
