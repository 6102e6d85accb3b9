"""An ordinary training script. With `import dtorch as torch` as its first import the losses are the same, bit by bit.

python examples/plain_script.py
"""

import torch

nn = torch.nn
F = torch.nn.functional


class Classifier(nn.Module):
    """A transformer layer over short sequences of tokens, then a perceptron with batch statistics and dropout."""

    def __init__(self, words: int = 64, width: int = 32, classes: int = 10) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.mix = nn.TransformerEncoderLayer(width, nhead=4, dim_feedforward=64, dropout=0.1, batch_first=True)
        self.classify = nn.Sequential(
            nn.Linear(width, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, classes)
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.classify(self.mix(self.embed(tokens)).mean(dim=1))


def train(optimizer_name: str, steps: int = 30) -> None:
    torch.manual_seed(0)
    tokens = torch.randint(0, 64, (256, 12))
    labels = (tokens.sum(dim=1) // 7) % 10
    model = Classifier()
    if optimizer_name == "adamw":
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.05)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)

    for step in range(steps):
        rows = torch.randperm(256)[:32]
        noise = 0.01 * torch.randn(32, 10)
        loss = F.cross_entropy(model(tokens[rows]) + noise, labels[rows], label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        print(f"{optimizer_name} step {step} loss {loss.item().hex()} norm {norm.item().hex()}")

    model.eval()
    with torch.no_grad():
        accuracy = (model(tokens).argmax(dim=-1) == labels).float().mean()
    weight = model.state_dict()["embed.weight"].double().sum()
    print(f"{optimizer_name} accuracy {accuracy.item():.4f} weights {weight.item().hex()}")


train("adamw")
train("sgd")
