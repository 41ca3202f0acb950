/* Writes what this rank does in its process groups into the recorder's table: see core/recorder/group_table.py. */

#ifndef GPUWATCH_GROUP_WRITER_H
#define GPUWATCH_GROUP_WRITER_H

#include "group_types.h"

/* Each of these returns 1 if the operation is noted, 0 if its group or work is not shown, -1 with an exception set. They
   do what GroupTable (worker/record/group_operations.py) does under the same name. `tensor` may be NULL. */
int begin_collective(GroupWriter *self, PyObject *group, int64_t operation, PyObject *tensor, int64_t root, Place *place);
int begin_p2p(GroupWriter *self, PyObject *group, int64_t operation, PyObject *tensor, int64_t peer, int64_t tag,
              Place *place);
int waits_for(GroupWriter *self, PyObject *work, Place *place);
int issued_work(GroupWriter *self, Place *place, PyObject *work);
int ended(GroupWriter *self, const Place *place, int on_host);
int leave_phase(GroupWriter *self, const Place *place, int64_t phase);
int count_again(GroupWriter *self, const Place *place, PyObject *group);
/* The call that begins an operation has raised: torch's error (is_refused), or a signal's handler's. */
int failed(GroupWriter *self, const Place *place, PyObject *group, int is_refused);
/* A collective that has begun is not issued. An exception may be set. */
void take_back(GroupWriter *self, const Place *place);

/* Forget all groups and works. */
void forget_groups(GroupWriter *self);
/* `group` holds the slot `number` from now on. -1 with an exception set. */
int enter_group(GroupWriter *self, Py_ssize_t number, PyObject *group);

/* The C function of a method that pybind11 has bound: borrowed. */
PyObject *function_of(PyObject *method);

#endif
