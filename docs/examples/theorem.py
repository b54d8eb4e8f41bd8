from torch import nn

from mptify.tools import theory

model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.ReLU(), nn.Linear(6, 1, bias=False))
target, factor = theory.scaled(model)  # each layer divided by what brings it into the hypotheses; the model is factor times the target
finding = theory.check(target, epsilon=0.3, delta=0.1, seeds=20)
print(f"error {finding.worst_error:.3f}, {finding.nonzeros:,} of at most {finding.nonzeros_allowed:,.0f} kept, {finding.failed} failed")
