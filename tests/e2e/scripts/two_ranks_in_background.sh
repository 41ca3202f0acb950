# Starts a script twice, in the background: at SIGTERM the shell ends, and leaves them to themselves.
export WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT="$1"
shift
RANK=1 "$@" &
RANK=0 "$@" &
wait
