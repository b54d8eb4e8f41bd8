from torch import nn

from mptify.tools import theory

model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.ReLU(), nn.Linear(6, 1, bias=False))
# Scale each layer so that the hypotheses hold; the model is `factor` times the target.
target, factor = theory.scaled(model)
finding = theory.check(target, epsilon=0.3, delta=0.1, seeds=20)
print(f"error {finding.worst_error:.3f}, {finding.failed} draws failed")
print(f"{finding.nonzeros:,} weights kept, {finding.nonzeros_allowed:,.0f} allowed")
