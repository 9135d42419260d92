"""LoRA with peft: the training of a plain loop, small checkpoints, exact resume, adapters in files."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from learnkit import Checkpoint, DataLoaders, Learner, WeightsError
from learnkit.checkpoint.digest import differences
from learnkit.checkpoint.folder import entries
from tests.helpers.learners import quiet_learner
from tests.helpers.libraries import require

peft = require('peft')
transformers = require('transformers')

# transformers deprecates what peft calls
pytestmark = pytest.mark.filterwarnings('ignore::FutureWarning')


def load_base(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = transformers.BertConfig(
        vocab_size=60,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=256,
        hidden_dropout_prob=0.1,
    )
    return transformers.BertForSequenceClassification(config)


def add_lora(base: Any) -> Any:
    lora = peft.LoraConfig(r=4, target_modules=['query', 'value'], modules_to_save=['classifier'])
    torch.manual_seed(1)
    return peft.get_peft_model(base, lora)


def rows() -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(5, 60, (32, 6), generator=torch.Generator().manual_seed(2))
    return [{'input_ids': i, 'labels': (i[:, 0] > 30).long()} for i in ids.split(8)]


def make(path: Path, base: Any = None, **options: Any) -> Learner:
    model = add_lora(load_base() if base is None else base)
    saver = Checkpoint('1ba', keep_last=None, **options)
    opt_func = torch.optim.SGD
    dls = DataLoaders(rows(), rows())
    return quiet_learner(dls, model, opt_func=opt_func, lr=0.1, path=path, cbs=saver)


def test_training_matches_a_loop_by_hand(tmp_path: Path) -> None:
    learn = make(tmp_path)
    torch.manual_seed(3)
    learn.fit(2)
    model = add_lora(load_base())
    opt = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    torch.manual_seed(3)
    for _ in range(2):
        model.train()
        for batch in rows():
            opt.zero_grad()
            model(**batch).loss.backward()
            opt.step()
    for (name, own), (_, other) in zip(
        learn.model.named_parameters(), model.named_parameters(), strict=True
    ):
        assert torch.equal(own, other), name


def test_checkpoints_have_the_adapter_and_resume_exactly(tmp_path: Path) -> None:
    small, full = (make(tmp_path / str(flag), trainable_only=flag) for flag in (True, False))
    for learn in (small, full):
        torch.manual_seed(3)
        learn.fit(2)
    files = [entries(tmp_path / str(flag) / 'checkpoints')[0].path for flag in (True, False)]
    sizes = [file.stat().st_size for file in files]
    n_frozen = sum(p.numel() for p in small.model.parameters() if not p.requires_grad)
    assert sizes[1] - sizes[0] == pytest.approx(4 * n_frozen, rel=0.1)
    end = small.checkpoint_state()
    middle = entries(tmp_path / 'True' / 'checkpoints')[5].path
    learn = make(tmp_path / 'resumed', trainable_only=True)
    learn.fit(2, resume=middle)
    assert not differences(end, learn.checkpoint_state())
    other = make(tmp_path / 'True', base=load_base(seed=9), trainable_only=True)
    with pytest.raises(WeightsError, match='differ in this model'):
        other.fit(3, resume=True)


@pytest.mark.filterwarnings('ignore:Could not find a config file')  # of older releases
def test_adapters_are_saved_and_loaded_by_peft(tmp_path: Path) -> None:
    learn = make(tmp_path)
    learn.fit(1)
    learn.model.save_pretrained(tmp_path / 'adapter')
    model = peft.PeftModel.from_pretrained(load_base(), tmp_path / 'adapter')
    merged = model.merge_and_unload()
    assert not any('lora' in name for name, _ in merged.named_modules())
    expected = scores(learn.model)
    assert torch.allclose(scores(merged), expected, atol=1e-6)
    assert not torch.allclose(scores(load_base()), expected, atol=1e-3)


def scores(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([model.eval()(**batch).logits for batch in rows()])
