"""Train a tokenizer, a small BERT and a small GPT on the docstrings of five installed libraries.

    python examples/text.py                                     # all stages, some minutes on a CPU
    python examples/text.py --resume                            # after a kill: from the newest checkpoints
    torchrun --nproc-per-node=2 examples/text.py                # two processes, with the same batches in total

BERT predicts the library of a description; a logistic regression on word counts is trained for comparison. GPT writes
descriptions. Nothing is downloaded; `pip install "learnkit-torch[hf,demo]"` installs what the script needs.
The guide `nbs/project_text.ipynb` goes through this script step by step."""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from datasets import Dataset, DatasetDict, disable_progress_bars, load_from_disk
from filelock import FileLock
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import Pipeline, make_pipeline
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorForLanguageModeling,
    DataCollatorWithPadding,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
)

from learnkit import (
    Adam,
    Checkpoint,
    DataLoaders,
    GradientClip,
    Learner,
    Perplexity,
    SaveModelCallback,
    accuracy,
)

LIBRARIES = ('python', 'numpy', 'scipy', 'sklearn', 'torch')  # python: the standard library
LEFT_OUT = {'test', 'tests', 'testing', 'site-packages', 'idlelib', '_vendor', 'externals'}
# where lists of parameters, examples and so on begin: each library has its own style for them
SECTION = re.compile(r'\n\s*(?:\w[\w ]*\n\s*[-=~]{3,}|\w+:\s*\n|:\w+|\.\. |>>>|::|[*-] )')
NAMES = re.compile(r'\b(python|numpy|np|scipy|sklearn|scikit-learn|scikit|torch|pytorch)\b', re.I)
SHARES = {'train': 0.6, 'valid': 0.2, 'test': 0.2}  # of the descriptions
MAX_OF_FILE = 20  # descriptions
MAX_TOKENS = 64  # of a description; the rest is cut off

disable_progress_bars()


# -- the corpus ------------------------------------------------------------------------------------


def find_folder(library: str) -> Path:
    "Return the folder of a library's source files."
    if library == 'python':
        return Path(sysconfig.get_path('stdlib'))
    spec = find_spec(library)
    return Path(spec.submodule_search_locations[0])


def clean(docstring: str) -> str:
    "Return the description of a docstring: what comes before its sections, without names of libraries."
    description = SECTION.split('\n' + docstring)[0]
    return NAMES.sub('it', ' '.join(description.split()))


def read_descriptions(path: Path) -> Iterator[str]:
    "Yield the descriptions of a file's functions and classes that have eight words or more."
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # of string escapes in other people's code
        try:
            tree = ast.parse(path.read_text('utf-8'))
        except (SyntaxError, UnicodeDecodeError):
            return
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            description = clean(ast.get_docstring(node) or '')
            if len(description.split()) >= 8:
                yield description


def read_corpus(
    n: int,  # descriptions of each library
    seed: int = 0,  # of the order in which files are read
) -> DatasetDict:  # splits 'train', 'valid' and 'test' with columns `text` and `label`
    """Read descriptions from the source files of the libraries.

    All descriptions of a file are in one split, because neighbors resemble each other. No description is there twice.
    """
    rows: dict[str, list[dict[str, str | int]]] = {name: [] for name in SHARES}
    seen: set[str] = set()
    for label, library in enumerate(LIBRARIES):
        folder = find_folder(library)
        files = [
            path
            for path in sorted(folder.rglob('*.py'))
            if not LEFT_OUT.intersection(path.relative_to(folder).parts)
        ]
        random.Random(seed).shuffle(files)
        n_read = dict.fromkeys(SHARES, 0)
        for path in files:
            new = [text for text in dict.fromkeys(read_descriptions(path)) if text not in seen]
            split = min(SHARES, key=lambda name: n_read[name] / SHARES[name])
            rows[split] += [{'text': text, 'label': label} for text in new[:MAX_OF_FILE]]
            n_read[split] += len(new[:MAX_OF_FILE])
            seen.update(new)
            if sum(n_read.values()) >= n:
                break
    return DatasetDict({name: Dataset.from_list(split) for name, split in rows.items()})


def train_tokenizer(descriptions: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    "Train byte-pair encoding; each description begins with [CLS] and ends with [SEP]."
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=['[PAD]', '[CLS]', '[SEP]'],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(descriptions, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single='[CLS] $A [SEP]', special_tokens=[('[CLS]', 1), ('[SEP]', 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token='[PAD]',
        cls_token='[CLS]',
        sep_token='[SEP]',
        model_max_length=MAX_TOKENS,
    )


def tokenize(corpus: DatasetDict, tokenizer: PreTrainedTokenizerFast) -> DatasetDict:
    "Add the columns `input_ids` and `attention_mask`."
    return corpus.map(lambda rows: tokenizer(rows['text'], truncation=True), batched=True)


def prepare(
    folder: Path,
    n: int,  # descriptions of each library
    vocab_size: int,
) -> tuple[DatasetDict, PreTrainedTokenizerFast]:
    "Read the corpus and train the tokenizer, once in a folder; other processes wait, and read the files."
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / 'prepare.lock'):
        if not (folder / 'tokenizer').exists():
            corpus = read_corpus(n)
            tokenizer = train_tokenizer(corpus['train']['text'], vocab_size)
            tokenize(corpus, tokenizer).save_to_disk(folder / 'corpus')
            tokenizer.save_pretrained(folder / 'tokenizer.part')
            os.replace(folder / 'tokenizer.part', folder / 'tokenizer')  # now all is there
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / 'tokenizer')
    return load_from_disk(folder / 'corpus'), tokenizer


# -- which library is it from? ---------------------------------------------------------------------


def make_baseline(c: float) -> Pipeline:
    "Return a logistic regression on the frequencies of words and pairs of words; a large `c` fits closely."
    words = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True)
    return make_pipeline(words, LogisticRegression(C=c, max_iter=1000))


def fit_baseline(corpus: DatasetDict) -> Pipeline:
    "Return the baseline with the best accuracy on the validation split."
    train, valid = corpus['train'], corpus['valid']
    candidates = [
        make_baseline(c).fit(train['text'], train['label']) for c in (1.0, 3.0, 10.0, 30.0)
    ]
    return max(candidates, key=lambda model: model.score(valid['text'], valid['label']))


def class_loaders(
    corpus: DatasetDict, tokenizer: PreTrainedTokenizerFast, bs: int = 32
) -> DataLoaders:
    "Return batches of `input_ids`, `attention_mask` and `labels`, padded to their longest description."
    tokens = corpus.remove_columns('text')
    dls = DataLoaders.from_datasets(
        tokens['train'],
        {'valid': tokens['valid']},
        bs=bs,
        seed=0,
        collate_fn=DataCollatorWithPadding(tokenizer),
    )
    dls.vocab = list(LIBRARIES)
    return dls


def make_bert(
    tokenizer: PreTrainedTokenizerFast, width: int = 128, depth: int = 2
) -> BertForSequenceClassification:
    "Return a small BERT with random weights."
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=len(tokenizer),
            hidden_size=width,
            num_hidden_layers=depth,
            num_attention_heads=4,
            intermediate_size=2 * width,
            max_position_embeddings=MAX_TOKENS,
            pad_token_id=tokenizer.pad_token_id,
            num_labels=len(LIBRARIES),
        )
    )


def train_bert(
    dls: DataLoaders,
    model: BertForSequenceClassification,
    lr: float,
    epochs: int,
    folder: Path,
    resume: bool = False,
) -> Learner:
    "Train BERT, and keep the weights of the epoch with the best validation accuracy."
    learn = Learner(
        dls,
        model,
        opt_func=Adam,
        metrics=accuracy,
        path=folder / f'bert, lr {lr:g}',
        cbs=[Checkpoint(), GradientClip(1.0), SaveModelCallback(monitor='accuracy')],
    )
    with learn.distributed('ddp'):
        learn.fit_one_cycle(epochs, lr, wd=0.1, resume=resume)
    return learn


# -- what comes next? ------------------------------------------------------------------------------


def language_loaders(
    corpus: DatasetDict, tokenizer: PreTrainedTokenizerFast, bs: int = 32
) -> DataLoaders:
    "Return batches of `input_ids`, `attention_mask` and `labels`, which are -100 where there is padding."
    tokens = corpus.remove_columns(['text', 'label'])
    return DataLoaders.from_datasets(
        tokens['train'],
        {'valid': tokens['valid']},
        bs=bs,
        seed=0,
        collate_fn=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )


def make_gpt(
    tokenizer: PreTrainedTokenizerFast, width: int = 128, depth: int = 2
) -> GPT2LMHeadModel:
    "Return a small GPT with random weights."
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=MAX_TOKENS,
        n_embd=width,
        n_layer=depth,
        n_head=4,
        bos_token_id=tokenizer.cls_token_id,
        eos_token_id=tokenizer.sep_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = GPT2LMHeadModel(config)
    model.loss_type = 'ForCausalLM'  # its default; transformers warns of a loss without a name
    return model


def train_gpt(
    dls: DataLoaders,
    model: GPT2LMHeadModel,
    lr: float,
    epochs: int,
    folder: Path,
    resume: bool = False,
) -> Learner:
    "Train GPT to predict the next token, and keep the weights of the epoch with the lowest validation loss."
    learn = Learner(
        dls,
        model,
        opt_func=Adam,
        metrics=Perplexity,
        path=folder / 'gpt',
        cbs=[Checkpoint(), GradientClip(1.0), SaveModelCallback()],
    )
    with learn.distributed('ddp'):
        learn.fit_one_cycle(epochs, lr, wd=0.1, resume=resume)
    return learn


def unigram_perplexity(train: Dataset, test: Dataset, vocab_size: int) -> float:
    "Return the perplexity of guessing each token by its frequency, which a language model has to beat."
    counts = torch.ones(vocab_size)  # tokens that never occur get a chance, too
    for ids in train['input_ids']:
        counts += torch.bincount(torch.tensor(ids[1:]), minlength=vocab_size)
    log_probs = (counts / counts.sum()).log()
    targets = torch.tensor([i for ids in test['input_ids'] for i in ids[1:]])
    return (-log_probs[targets].mean()).exp().item()


def write(
    model: GPT2LMHeadModel,
    tokenizer: PreTrainedTokenizerFast,
    start: str,
    temperature: float = 0.7,  # lower: likelier words
    seed: int = 0,
) -> str:
    "Return a description that begins with `start`."
    torch.manual_seed(seed)
    tokens = tokenizer(start, return_tensors='pt').to(model.device)
    ids = model.eval().generate(
        tokens['input_ids'][:, :-1],  # without [SEP], which ends a description
        attention_mask=tokens['attention_mask'][:, :-1],
        max_length=MAX_TOKENS,
        do_sample=True,
        temperature=temperature,
    )
    return tokenizer.decode(ids[0], skip_special_tokens=True)


# -- the whole project -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    "How much is read and trained."

    n: int = 1200  # descriptions of each library
    vocab_size: int = 3000
    epochs_bert: int = 8
    epochs_gpt: int = 6
    bs: int = 32  # descriptions in a batch, of all processes together


QUICK = Sizes(n=40, vocab_size=500, epochs_bert=2, epochs_gpt=1, bs=16)


def main(
    arguments: Sequence[str] | None = None,  # None: of the command line
) -> None:
    "Train all models, and print their figures."
    parser = argparse.ArgumentParser(description='Train BERT and GPT on docstrings.')
    parser.add_argument('--folder', type=Path, default=Path('docstrings'), help='for all files')
    parser.add_argument('--resume', action='store_true', help='continue from the checkpoints there')
    parser.add_argument('--quick', action='store_true', help='a few descriptions and epochs')
    args = parser.parse_args(arguments)
    sizes = QUICK if args.quick else Sizes()
    show = print if int(os.environ.get('RANK', 0)) == 0 else lambda *_: None
    bs = sizes.bs // int(os.environ.get('WORLD_SIZE', 1))

    if args.quick:
        show('--quick shows that the script runs: its figures mean nothing.')
    corpus, tokenizer = prepare(args.folder, sizes.n, sizes.vocab_size)
    show({name: len(split) for name, split in corpus.items()})
    test = corpus['test']

    baseline = fit_baseline(corpus)
    dls = class_loaders(corpus, tokenizer, bs)
    runs = []
    for lr in (3e-4, 1e-3):
        show(f'BERT, learning rate {lr:g}')
        torch.manual_seed(0)
        model = make_bert(tokenizer)
        runs.append(train_bert(dls, model, lr, sizes.epochs_bert, args.folder, args.resume))
    bert = max(runs, key=lambda learn: max(row['accuracy'] for row in learn.history))
    tokens = DataLoaders.from_datasets(
        test.remove_columns('text'), bs=64, collate_fn=DataCollatorWithPadding(tokenizer)
    )
    show(f'logistic regression: test accuracy {baseline.score(test["text"], test["label"]):.1%}')
    show(f'BERT: test accuracy {bert.validate(dl=tokens.train)["accuracy"]:.1%}')

    show('GPT')
    dls = language_loaders(corpus, tokenizer, bs)
    torch.manual_seed(0)
    gpt = train_gpt(
        dls, make_gpt(tokenizer), 3e-3, sizes.epochs_gpt, args.folder, resume=args.resume
    )
    tokens = DataLoaders.from_datasets(
        test.remove_columns(['text', 'label']), bs=64, collate_fn=dls.train.collate_fn
    )
    by_frequency = unigram_perplexity(corpus['train'], test, len(tokenizer))
    show(f'guessing by frequency: test perplexity {by_frequency:.1f}')
    show(f'GPT: test perplexity {gpt.validate(dl=tokens.train)["perplexity"]:.1f}')
    for start in ('Return the', 'Compute the', 'A class'):
        show(write(gpt.model, tokenizer, start))


if __name__ == '__main__':
    main()
