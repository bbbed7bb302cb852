#!/bin/sh
# Judge the changes of train.py: the fewest CPU seconds to an accuracy of 95 %. Folders that a stranger can check go to
# OUT, one for each change: ./judge.sh [OUT]. Some minutes on one core.
set -u
cd "$(dirname "$0")"
out=${1:-proof}
for change in momentum he smoothing; do
  tunediff compare --run 'python train.py --seed {seed} --change {change}' change=none change=$change \
    --objective accuracy --mode max --target 'accuracy>=0.95' --time 'train_time:([\d.]+)s' --budget 30s \
    --level 0.01 --name "speedrun-$change" --out "$out/$change" --quiet
done
