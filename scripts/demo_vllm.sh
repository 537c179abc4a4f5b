#!/usr/bin/env bash
# Usage: scripts/demo_vllm.sh VENV VENV_VLLM
# Runs the demo with its judge served by vLLM on this machine's CPU: starts the server, trains, stops the server.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export GOMP_SPINCOUNT=0  # trainer and server share the cores: threads that spin make a step five times as long
prefgrpo=$1/bin/prefgrpo vllm=$2/bin/vllm port=${PORT:-8211}

log=$(mktemp)
# In its own session, so that Ctrl-C reaches only the trainer, which still needs the judge to finish its step.
setsid "$prefgrpo" judge serve prefgrpo/tiny/assets/judge --vllm "$vllm" --cpu --port "$port" --name judge \
    --max-model-len 512 >"$log" 2>&1 &
server=$!
trap 'kill "$server" 2>/dev/null || true; wait "$server" 2>/dev/null || true; rm -f "$log"' EXIT

echo "==> starting vLLM on 127.0.0.1:$port (half a minute to two)"
until "$prefgrpo" judge check --endpoint "http://127.0.0.1:$port" --template caption_match >/dev/null 2>&1; do
    kill -0 "$server" 2>/dev/null || { cat "$log" >&2; echo "error: the judge server did not start" >&2; exit 1; }
    sleep 1
done
"$prefgrpo" train scripts/demo/vllm.yaml --judge.endpoints "http://127.0.0.1:$port" --resume
