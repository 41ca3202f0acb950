/* Writes a frame while another process reads the file.

   Who owns the open page while C writes:
   - The GIL is held from `borrow_...` to PyBuffer_Release, and nothing in between calls Python. So no other
     thread of Python writes a byte meanwhile.
   - Code in Python may be half-way through a frame when another thread gets the GIL. Such code holds the
     mutex (RecorderLock, worker/record/progress.py), and its thread's id is in the cursor's cell HOLDER. C looks there, and
     gives up if that is another thread. C never waits for the mutex here: the holder may need the GIL.
   - The thread that holds the mutex may write here, as a signal's handler does that has interrupted its own writing in
     Python: the mutex is an RLock. Python writes what belongs together without a call in between, so that no handler comes
     half-way (core/recorder/writer.py), and compares the counts before it writes.
   - Between `begin_frame` and `store_frame` the GIL may be released: while a large tensor is read
     (threads.c), at each call of Python, and by finalizers, which gc until 3.11 may run at any allocation. Another thread may
     then write a frame, end the page or close the file. `store_frame` compares page and counts, and stores nothing if one
     differs. Python then writes the frame.
   - A device writes numbers into values that were taken for it before (`take_values`), without Python. It writes nothing else,
     and no other writer touches those values.
   - The process that reads takes no lock. It trusts the counts, and these are written last: see `publish` in layout.h. */

#include "frame_store.h"

#include <string.h>

#include "objects.h"

/* The open segment; NULL, with no exception set, if there is none. The file cannot be unmapped until PyBuffer_Release: mmap
   counts who borrows its memory, and its close() refuses meanwhile. A file that is closed already lends nothing. The caller
   keeps the GIL until then. */
static char *borrow_segment(FrameWriter *self, Py_buffer *memory, int64_t *at)
{
    if (self->cell.buf == NULL)
        return NULL;
    const int64_t *cell = self->cell.buf;
    *at = cell[0];
    if (*at < 0 || (cell[1] != 0 && (uint64_t)cell[1] != (uint64_t)PyThread_get_thread_ident()))
        return NULL; /* Python writes, in another thread: worker/record/progress.py */
    if (PyObject_GetBuffer(self->memory, memory, PyBUF_WRITABLE) < 0) {
        drop_error();
        return NULL;
    }
    if (*at + SEGMENT_BYTES <= memory->len)
        return (char *)memory->buf + *at;
    PyBuffer_Release(memory);
    return NULL;
}

/* Read the counts of the open segment; 0 if there is none. */
static int read_segment(FrameWriter *self, Frame *frame)
{
    Py_buffer memory;
    const int64_t *segment = (int64_t *)borrow_segment(self, &memory, &frame->at);
    if (segment == NULL)
        return 0;
    frame->page = segment[S_PAGE];
    frame->batch = segment[S_BATCH];
    frame->value_base = segment[S_VALUE_BASE];
    frame->frames = segment[S_FRAMES];
    frame->row_count = segment[S_ROWS];
    frame->values = segment[S_VALUES];
    PyBuffer_Release(&memory);
    return 1;
}

int begin_frame(FrameWriter *self, Frame *frame)
{
    frame->used = frame->may_wait = 0;
    return read_segment(self, frame);
}

int follow_segment(FrameWriter *self, Frame *frame)
{
    const int64_t page = frame->page;
    return read_segment(self, frame) && frame->page == page;
}

/* The same where they fit into the open segment; -1, and nothing is taken, where they do not. */
static int64_t take_here(FrameWriter *self, const Frame *frame, int count, int64_t *index)
{
    static const Numbers pending = {0, 0, VALUE_PENDING};
    Py_buffer memory;
    int64_t at, used = -1;
    char *segment = borrow_segment(self, &memory, &at);
    if (segment == NULL)
        return -1;
    int64_t *counts = (int64_t *)segment;
    if (counts[S_PAGE] == frame->page && counts[S_VALUES] + count <= VALUES_PER_SEGMENT) {
        used = counts[S_VALUES];
        *index = counts[S_VALUE_BASE] + used;
        for (int i = 0; i < count; i++)
            memcpy(segment + VALUES_AT + (used + i) * VALUE_BYTES, &pending, sizeof pending);
        publish(&counts[S_VALUES], used + count);
    }
    PyBuffer_Release(&memory);
    return used;
}

int64_t take_values(FrameWriter *self, const Frame *frame, int count, int64_t *index)
{
    const int64_t used = take_here(self, frame, count, index);
    if (used >= 0)
        return used;
    PyObject *done = PyObject_CallNoArgs(self->next_segment); /* the caller holds the mutex */
    Py_XDECREF(done);
    return done != NULL ? take_here(self, frame, count, index) : -1;
}

static void put_value(char *segment, int64_t position, const Row *row)
{
    memcpy(segment + VALUES_AT + position * VALUE_BYTES, &row->numbers, sizeof row->numbers);
}

static void put_rows(char *segment, const Frame *frame)
{
    char *place = segment + ROWS_AT + frame->row_count * ROW_BYTES;
    for (int i = 0; i < frame->used; i++) {
        const Row *row = &frame->rows[i];
        const uint32_t words[] = {row->slot, (uint32_t)row->value, row->shape};
        memcpy(place, words, sizeof words);
        place[ROW_DTYPE] = (char)row->dtype;
        place[ROW_KIND] = (char)row->kind;
        memcpy(place + ROW_MARK, &row->mark, sizeof row->mark);
        place += ROW_BYTES;
    }
}

static void put_frame(char *segment, const Frame *frame, const Call *call)
{
    const int64_t index = ((int64_t *)segment)[S_FRAME_BASE] + frame->frames;
    const uint32_t names[] = {(uint32_t)call->module, (uint32_t)call->parent};
    const int16_t depth = (int16_t)(call->depth > INT16_MAX ? INT16_MAX : call->depth);
    const uint32_t rows[] = {(uint32_t)frame->row_count, (uint32_t)frame->used, (uint32_t)index};
    char *place = segment + SEGMENT_HEADER + frame->frames * FRAME_BYTES;
    memcpy(place, names, sizeof names);
    memcpy(place + FRAME_DEPTH, &depth, sizeof depth);
    place[FRAME_PHASE] = (char)call->phase;
    place[FRAME_COLLECTIVES] = (char)(call->collectives > 255 ? 255 : call->collectives);
    memcpy(place + FRAME_SEQ, &frame->seq, sizeof frame->seq);
    memcpy(place + FRAME_ROWS, rows, sizeof rows);
}

/* The open segment, if nothing was written into it since the frame was begun; else NULL. */
static char *borrow_same(FrameWriter *self, const Frame *frame, Py_buffer *memory)
{
    int64_t at;
    char *segment = borrow_segment(self, memory, &at);
    if (segment == NULL)
        return NULL;
    const int64_t *counts = (int64_t *)segment;
    if (at == frame->at && counts[S_PAGE] == frame->page && counts[S_FRAMES] == frame->frames &&
        counts[S_ROWS] == frame->row_count && counts[S_VALUES] == frame->values)
        return segment;
    PyBuffer_Release(memory);
    return NULL;
}

/* Have Python's recorder continue the page in a new segment, because this one is full. NULL if the page has changed. */
static char *borrow_next(FrameWriter *self, Frame *frame, Py_buffer *memory)
{
    const int64_t next_value = frame->value_base + frame->values;
    PyBuffer_Release(memory); /* before Python runs: it may close the file */
    PyObject *done = PyObject_CallNoArgs(self->next_segment);
    Py_XDECREF(done);
    if (done == NULL || !follow_segment(self, frame)) {
        drop_error();
        return NULL;
    }
    const int is_empty = frame->values == 0 && frame->row_count == 0 && frame->frames == 0;
    return is_empty && frame->value_base == next_value ? borrow_same(self, frame, memory) : NULL;
}

int store_frame(FrameWriter *self, Frame *frame, const Call *call)
{
    Py_buffer memory;
    char *segment = borrow_same(self, frame, &memory);
    for (int i = 0; i < frame->used && segment != NULL; i++) {
        const Row *row = &frame->rows[i];
        if (!row->has_value)
            continue;
        if (frame->values == VALUES_PER_SEGMENT && (segment = borrow_next(self, frame, &memory)) == NULL)
            return 0;
        put_value(segment, frame->values++, row);
        /* The values come before the rows. A reader that sees values without their rows loses nothing. A reader that saw a
           row without its value would read what lay there before. */
        publish(&((int64_t *)segment)[S_VALUES], frame->values);
    }
    if (segment != NULL &&
        (frame->frames == FRAMES_PER_SEGMENT || frame->row_count + frame->used > ROWS_PER_SEGMENT))
        segment = borrow_next(self, frame, &memory);
    if (segment == NULL)
        return 0;
    put_rows(segment, frame);
    put_frame(segment, frame, call);
    int64_t *counts = (int64_t *)segment, *header = memory.buf;
    publish(&counts[S_ROWS], frame->row_count + frame->used);
    publish(&counts[S_FRAMES], frame->frames + 1);
    if (call->rank_phase >= 0)
        publish(&header[F_PHASE], call->rank_phase);
    if (call->rank_module >= 0)
        publish(&header[F_MODULE], call->rank_module);
    PyBuffer_Release(&memory);
    return 1;
}
