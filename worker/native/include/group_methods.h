/* The methods of torch's ProcessGroup and Work, with the notes that each call makes before and after. */

#ifndef GPUWATCH_GROUP_METHODS_H
#define GPUWATCH_GROUP_METHODS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "group_writer.h"

/* Make the types, and add GroupWriter to the module. -1 with an exception set. */
int add_group_methods(PyObject *module);
int add_group_hook(void);

/* How many noted methods this thread is inside of: what torch issues meanwhile is theirs. */
extern _Thread_local int calls_inside;

/* Hand the exception that is set to Python, if it is gpuwatch's own. Any other is kept: see errors.h. */
void tell_fault(GroupWriter *self);
/* An operation begins. -1 with an exception set. */
int tell_before(GroupWriter *writer);
/* hook(group, operations) -> what torch calls before the group's collectives */
PyObject *writer_hook(GroupWriter *self, PyObject *args);

#endif
