"""Hugging Face's Trainer and the Learner with the settings of the guide: equal losses and weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from learnkit import GradientClip, Learner, ParamScheduler, SchedLin


def make_rows() -> list[dict[str, Any]]:
    ids = torch.randint(4, 60, (160, 12))
    labels = (ids == 7).any(1).long()
    return [{'input_ids': i, 'labels': label} for i, label in zip(ids, labels, strict=True)]


def make_bert() -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=60,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForSequenceClassification(config)


@pytest.mark.notebook
@pytest.mark.filterwarnings('ignore')  # what the Trainer and Accelerate warn of
def test_the_trainer_and_the_learner_come_to_the_same_weights(tmp_path: Path) -> None:
    transformers = pytest.importorskip('transformers')
    pytest.importorskip('accelerate')
    rows = make_rows()
    train, valid = rows[:128], rows[128:]
    args = transformers.TrainingArguments(
        output_dir=tmp_path,
        num_train_epochs=2,
        learning_rate=1e-3,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=16,
        weight_decay=0.01,
        train_sampling_strategy='sequential',
        save_strategy='no',
        report_to='none',
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = transformers.Trainer(make_bert(), args, train_dataset=train, eval_dataset=valid)
    trainer.train()

    dls = (DataLoader(train, 16), DataLoader(valid, 16))
    model = make_bert()
    cbs = GradientClip(1.0)
    learn = Learner(dls, model, opt_func=torch.optim.AdamW, wd=0.01, wd_bn_bias=False, cbs=cbs)
    with learn.no_bar(), learn.no_logging():
        learn.fit(2, cbs=ParamScheduler({'lr': SchedLin(1e-3, 0.0)}))
    assert learn.time.st == trainer.state.global_step == 16
    expected = trainer.evaluate()['eval_loss']
    assert learn.history[-1]['valid_loss'] == pytest.approx(expected, abs=1e-6)
    # the gradient of the keys' bias is zero up to rounding, which AdamW scales up
    theirs = {name: p for name, p in trainer.model.named_parameters() if 'key.bias' not in name}
    mine = dict(learn.model.named_parameters())
    torch.testing.assert_close({name: mine[name] for name in theirs}, theirs, rtol=0, atol=1e-5)
