# Starts ddp_overflow.py twice, as a script of a user's own would: no launcher, and a variable for each rank.
export WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT="$1" PYTHON="$2"
shift 2
RANK=1 "$PYTHON" "$@" & second=$!
RANK=0 "$PYTHON" "$@"
first=$?
wait $second || exit $?
exit $first
