/* Reads the new tensors of a frame, and gives each value its index in the page. */

#include "frame_reads.h"

#include "device_rows.h"

static int is_near_overflow(const FrameWriter *self, const Row *row)
{
    return row->dtype < FLOATS_END && self->near[row->dtype] <= row->numbers.high &&
           row->numbers.high < self->largest[row->dtype];
}

/* Whether zeros and subnormals are counted, which Python does: for low precision, in one of COUNT_EVERY batches. */
static int is_counted(const Frame *frame, const Row *row)
{
    return (row->dtype == DTYPE_FLOAT16 || row->dtype == DTYPE_BFLOAT16) && frame->batch % COUNT_EVERY == 0;
}

/* Read the tensors in host memory; 0 if one of them is left to Python */
static int read_host_rows(FrameWriter *self, Frame *frame)
{
    for (int i = 0; i < frame->used; i++) {
        Row *row = &frame->rows[i];
        if (row->to_read &&
            ((!row->is_weight && is_counted(frame, row)) || !read_plain(&row->view, &row->numbers) ||
             (row->is_output && is_near_overflow(self, row))))
            return 0;
    }
    return 1;
}

/* Values are numbered by the counts that `begin_frame` has read. If another thread took some meanwhile, the numbers are wrong: then
   `store_frame` does not store them. */
int read_rows(FrameWriter *self, Frame *frame, int64_t step)
{
    if (!read_host_rows(self, frame) || !read_device_rows(self, frame, step))
        return 0;
    int64_t value = frame->value_base + frame->values;
    for (int i = 0; i < frame->used; i++) {
        Row *row = &frame->rows[i];
        if (row->has_value)
            row->value = value++;
        if (row->same != NO_ROW) {
            const Row *other = &frame->rows[row->same];
            row->value = other->value;
            row->dtype = other->dtype;
            row->kind = other->kind;
        }
    }
    return 1;
}
