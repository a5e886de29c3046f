#!/usr/bin/env bash
# Train on a slice of TPU VMs with nothing but gcloud: ask for it, wait, install, and start one command on all hosts.
# From the root of this repository. Run it again after a preemption (docs/pods.md); training goes on from its newest
# checkpoint. Delete the queued resource in the end: until then the slice is paid for.
set -euo pipefail
: "${TPU:?a name for the slice}" "${ZONE:?a zone of Google Cloud}" "${SHARE:?HOST:/PATH of an NFS share, as Filestore has}"
: "${DATA:?prepared rows, below /mnt/shared}" "${OUTPUT:?the run, below /mnt/shared}"

state() { gcloud compute tpus queued-resources describe "$TPU" --zone="$ZONE" --format='value(state.state)'; }
on_all() { gcloud compute tpus tpu-vm ssh "$TPU" --zone="$ZONE" --worker=all --command="$1"; }

state >/dev/null 2>&1 || gcloud compute tpus queued-resources create "$TPU" --node-id="$TPU" --zone="$ZONE" \
  --accelerator-type=v6e-16 --runtime-version=v2-alpha-tpuv6e --spot
until now=$(state) && [ "$now" = ACTIVE ]; do
  case "$now" in "" | FAILED | SUSPEND* | DELET*) echo "$TPU is ${now:-not there}: delete the queued resource, then run this again" >&2; exit 1 ;; esac
  sleep 30
done

rm -rf dist && python3 -m pip wheel --no-deps --wheel-dir dist .
gcloud compute tpus tpu-vm scp dist/dflash_jax-*.whl constraints.txt "$TPU:" --zone="$ZONE" --worker=all
on_all "set -e
  sudo apt-get -qq update && sudo apt-get -qq -o DPkg::Lock::Timeout=300 install -y nfs-common
  sudo mkdir -p /mnt/shared && { mountpoint -q /mnt/shared || sudo mount '$SHARE' /mnt/shared; }
  sudo mkdir -p '$OUTPUT' && sudo chown \$(id -u) '$OUTPUT'
  curl -LsSf https://astral.sh/uv/install.sh | sh
  ~/.local/bin/uv venv --allow-existing --python 3.12 ~/dflash
  ~/.local/bin/uv pip install --python ~/dflash -c ~/constraints.txt \"\$(ls ~/dflash_jax-*.whl)[tpu]\""

# A unit outlives this connection; when the machine goes down, or at `systemctl stop dflash`, it gets SIGTERM and time.
on_all "sudo systemd-run --unit=dflash --collect --uid=\$(id -u) --setenv=HOME=\$HOME --setenv=HF_TOKEN='${HF_TOKEN:-}' \
  --property=TimeoutStopSec=300 --property=LimitMEMLOCK=infinity \
  ~/dflash/bin/python -m training.run qwen3-8b --data '$DATA' --output '$OUTPUT' \
  --train.batch-size 16 --mesh.data 2 --mesh.fsdp 8"
gcloud compute tpus tpu-vm ssh "$TPU" --zone="$ZONE" --worker=0 --command="journalctl --unit=dflash --follow"
