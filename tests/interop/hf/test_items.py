"""The loss of a causal language model with callbacks of the Trainer: the sum over `num_items_in_batch`.

`tests/peers/hf_bench.py` compares with the Trainer."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from learnkit import DataLoaders, GradientAccumulation, Learner
from learnkit.interop import from_hf

transformers = pytest.importorskip('transformers')
pytestmark = pytest.mark.filterwarnings('ignore::FutureWarning')

T = 6


def make_rows() -> list[dict[str, Tensor]]:
    g = torch.Generator().manual_seed(0)
    rows = []
    for n in (2, 6, 3, 5, 4, 6, 2, 3):
        ids = torch.randint(30, (T,), generator=g)
        labels = ids.clone()
        labels[n:] = -100
        rows.append({'input_ids': ids, 'labels': labels})
    return rows


def make_gpt2() -> Any:
    torch.manual_seed(0)
    drops = dict.fromkeys(('resid_pdrop', 'embd_pdrop', 'attn_pdrop'), 0.0)
    ids = {'bos_token_id': 0, 'eos_token_id': 0}
    config = transformers.GPT2Config(
        vocab_size=30, n_positions=T, n_embd=8, n_layer=1, n_head=1, **drops, **ids
    )
    return transformers.GPT2LMHeadModel(config)


def make_llama() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=30,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
    )
    return transformers.LlamaForCausalLM(config)


class Logs:
    "Notes what is logged after each step."

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_log = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any, **kwargs: Any) -> None:
        if 'loss' in logs:
            self.losses.append(logs['loss'])


def train_by_hand(model: Any, n_window: int, first: int) -> list[float]:
    "Train as the Trainer does, on batches of two rows; `first` is the first label that it counts."
    opt = torch.optim.SGD(model.parameters(), 0.1)
    batches = list(DataLoader(make_rows(), 2))
    losses = []
    for start in range(0, len(batches), n_window):
        window = batches[start : start + n_window]
        n = sum((b['labels'][:, first:] != -100).sum() for b in window)
        total = 0.0
        for b in window:
            loss = model(**b, num_items_in_batch=n).loss
            loss.backward()
            total += loss.item()
        opt.step()
        opt.zero_grad()
        losses.append(total)
    return losses


@pytest.mark.parametrize('n_window', [1, 2, 3])
@pytest.mark.parametrize(('make', 'first'), [(make_gpt2, 0), (make_llama, 1)])
def test_the_loss_is_the_sum_over_the_items_of_a_step(make: Any, first: int, n_window: int) -> None:
    by_hand = make()
    expected = train_by_hand(by_hand, n_window, first)
    model = make()
    logs = Logs()
    learn = Learner(
        DataLoaders(DataLoader(make_rows(), 2), device='cpu'),
        model,
        opt_func=torch.optim.SGD,
        lr=0.1,
        cbs=[from_hf(logs), GradientAccumulation(batches=n_window)],
    )
    with learn.no_bar(), learn.no_logging():
        learn.fit(1)
    assert logs.losses == pytest.approx(expected, rel=1e-5)
    for p, q in zip(model.parameters(), by_hand.parameters(), strict=True):
        assert torch.equal(p, q) or (n_window > 1 and torch.allclose(p, q, rtol=1e-5, atol=1e-7))
    assert learn.weight_func is None and not learn.seams.holders
    by_hand.load_state_dict(model.state_dict())
    batch = next(iter(DataLoader(make_rows(), 2)))
    assert torch.equal(model(**batch).loss, by_hand(**batch).loss)  # nothing is passed any more


def test_a_loss_function_of_ones_own_is_left_alone() -> None:
    def loss_func(logits: Tensor, labels: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    losses = []
    for cbs in ([], [from_hf(Logs())]):
        learn = Learner(
            DataLoaders(DataLoader(make_rows(), 2), device='cpu'),
            make_gpt2(),
            loss_func,
            cbs=cbs,
            weight_func='tokens',
        )
        with learn.no_bar(), learn.no_logging():
            learn.fit(1)
        losses.append(learn.history[-1]['train_loss'])
    assert losses[0] == losses[1]


def test_a_function_of_the_output_gets_a_hint() -> None:
    def of_output(outputs: Any, labels: Tensor) -> Tensor:
        return outputs.logits.sum()

    data = DataLoaders(DataLoader(make_rows(), 2), DataLoader(make_rows(), 2), device='cpu')
    for options in ({'loss_func': of_output}, {'metrics': of_output}):
        learn = Learner(data, make_gpt2(), **options)
        with learn.no_bar(), learn.no_logging(), pytest.raises(Exception, match=r'.*') as e:
            learn.fit(1)
        said = '\n'.join([str(e.value), *getattr(e.value, '__notes__', [])])
        assert 'the Learner passes the logits' in said


def test_arguments_alone_decide_when_the_fit_evaluates() -> None:
    pytest.importorskip('accelerate')
    args = transformers.TrainingArguments(
        'unused',
        eval_strategy='steps',
        eval_steps=3,
        logging_steps=2,
        save_strategy='no',
        report_to='none',
        use_cpu=True,
    )
    learn = Learner(
        DataLoaders(DataLoader(make_rows(), 2), DataLoader(make_rows(), 4), device='cpu'),
        make_gpt2(),
        cbs=from_hf(args),
    )
    for n_fits in (1, 2):
        with learn.no_bar(), learn.no_logging():
            learn.fit(2)
        found = [
            row['ba'] - 8 * (n_fits - 1) for row in learn.recorder.evaluations[3 * n_fits - 3 :]
        ]
        assert found == [3, 6, 8]  # and at the end
        assert learn.eval_every is not None
