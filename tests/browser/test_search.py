"""A question in a user's words leads to its page, among the first three results of the search."""

from typing import Any

import pytest

pytestmark = pytest.mark.browser
N_SHOWN = 3  # results that a reader looks at

# each question, with the pages that answer it
QUESTIONS = {
    'save the best model': 'howto/best_model',
    'early stopping': 'howto/best_model',
    'stop when validation loss does not improve': 'howto/best_model',
    'resume after a crash': 'howto/resume',
    'continue training from a checkpoint': 'howto/resume',
    'gradient clipping': 'howto/gradient_clipping',
    'exploding gradients': 'howto/gradient_clipping',
    'k-fold cross validation': 'howto/cross_validation',
    'several inputs': 'howto/inputs_outputs',
    'multi-task model with two losses': 'howto/inputs_outputs',
    'lstm with padded sequences': 'howto/sequences',
    'class imbalance': 'howto/class_imbalance',
    'weighted loss for rare classes': 'howto/class_imbalance',
    'learning rate warmup': 'howto/warmup',
    'custom metric': 'howto/own_metric',
    'train a GAN': 'howto/two_optimizers',
    'multiple optimizers': 'howto/two_optimizers',
    'gradient checkpointing': 'howto/activation_checkpointing',
    'export to onnx': 'howto/export',
    'use with scikit-learn pipeline': 'howto/scikit_learn',
    'log to tensorboard': 'howto/logging',
    'wandb': 'howto/logging',
    'cuda out of memory': 'howto/memory',
    'gradient accumulation': 'howto/memory',
    'mixed precision': 'howto/memory',
    'find the batch size': 'howto/memory',
    'multi gpu': 'howto/several_gpus',
    'fine-tune a pretrained model': 'howto/transfer_learning',
    'freeze layers': 'howto/transfer_learning',
    'hugging face dataset': 'howto/hugging_face',
    'lora': 'howto/lora',
    'hyperparameter tuning': 'howto/optuna',
    'why is training slow': 'howto/profile',
    'confusion matrix': 'howto/report',
    'learning rate finder': 'guides/04_schedules',
    'write a callback': 'guides/02_callbacks',
    'plot the loss': 'guides/05_metrics_history',
    'predict on new data': 'howto/save_load',
    'load a saved model': 'howto/save_load',
    'random seed': 'howto/reproducible',
    'custom training loop': 'guides/09_own_loop',
    'loss is nan': 'guides/10_debugging',
    'data augmentation mixup': 'guides/03_change_training',
    'tabular data': 'guides/project_tabular',
    'image classification': 'guides/project_images',
    'language model': 'guides/project_text',
    'slurm': 'distributed',
    'migrate from pytorch lightning': 'guides/from_lightning',
}

FIND = """query => {
    history.replaceState(null, '', '?q=' + encodeURIComponent(query));
    return Search._performSearch(...Search._parseQuery(query)).reverse().map(result => result[0]);
}"""


def test_a_question_leads_to_its_page(tab: Any, address: str) -> None:
    tab.goto(f'{address}/search.html')
    tab.wait_for_function('Search.hasIndex()')
    found = {question: tab.evaluate(FIND, question) for question in QUESTIONS}
    missed = {
        question: pages[: 2 * N_SHOWN]
        for question, pages in found.items()
        if QUESTIONS[question] not in pages[:N_SHOWN]
    }
    assert not missed
