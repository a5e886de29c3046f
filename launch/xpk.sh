#!/usr/bin/env bash
# Train on a TPU slice of a GKE cluster that xpk made. STORAGE is what `xpk storage attach` calls the shared place, and
# DATA and OUTPUT lie below its mount point. Again after it has ended: xpk workload delete, and then the same.
set -euo pipefail
: "${WORKLOAD:?a name for the run}" "${CLUSTER:?a cluster of xpk}" "${PROJECT:?its project}" "${ZONE:?its zone}"
: "${IMAGE:?an image of launch/Dockerfile}" "${STORAGE:?a storage of the cluster}" "${DATA:?prepared rows}" "${OUTPUT:?the run}"

exec xpk workload create --workload="$WORKLOAD" --cluster="$CLUSTER" --project="$PROJECT" --zone="$ZONE" \
  --tpu-type=v6e-16 --docker-image="$IMAGE" --storage="$STORAGE" \
  --max-restarts=100 --restart-on-exit-codes=1,75 --termination-grace-period-seconds=300 \
  --command="exec bash launch/restartable.sh \
    python -m training.run qwen3-8b --data '$DATA' --output '$OUTPUT' \
    --train.batch-size 16 --mesh.data 2 --mesh.fsdp 8"
