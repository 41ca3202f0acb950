# Starts a script twice, each rank in a cgroup of its own below that of the job, as a scheduler may do.
export WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT="$1" JOB="$2" ENTER='echo $$ > "$0" && exec "$@"'
shift 2
RANK=1 sh -c "$ENTER" "$JOB/rank1/cgroup.procs" "$@" & second=$!
RANK=0 sh -c "$ENTER" "$JOB/rank0/cgroup.procs" "$@"
first=$?
wait $second || exit $?
exit $first
