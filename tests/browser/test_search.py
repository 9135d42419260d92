"""A question in a user's words leads to its page, among the first three results of the search."""

from typing import Any

import pytest

pytestmark = pytest.mark.browser
N_SHOWN = 3  # results that a reader looks at

# each question, with the pages that answer it
QUESTIONS: dict[str, str | tuple[str, ...]] = {
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

# questions as people type them, written before the search was made for them and without the pages
SENTENCES: dict[str, str | tuple[str, ...]] = {
    'my training crashed how do I continue from the last checkpoint': 'howto/resume',
    'loss went to nan what now': 'guides/10_debugging',
    'how to freeze the backbone': 'howto/transfer_learning',
    'use two learning rates for body and head': ('howto/transfer_learning', 'guides/04_schedules'),
    'how do I log to wandb': 'howto/logging',
    'save the best model by validation accuracy': 'howto/best_model',
    'stop training when validation loss stops improving': 'howto/best_model',
    'out of memory what can I do': 'howto/memory',
    'train on several gpus': 'howto/several_gpus',
    'how to use a huggingface model': 'howto/hugging_face',
    'convert my pytorch lightning module': 'guides/from_lightning',
    'export model to onnx with variable sequence length': 'howto/export',
    'gradient accumulation last batch': 'howto/memory',
    'reproducible results between runs': 'howto/reproducible',
    'which random seed is used': 'howto/reproducible',
    'run in google colab': (
        'guides/01_quickstart',
        'guides/index',
        'index',
        'howto/resume',
        'howto/pause',
        'howto/mirror',
    ),
    'preemptible spot instance training': ('howto/resume', 'howto/mirror', 'checkpoints'),
    'slurm job gets requeued': ('distributed', 'howto/resume'),
    'change learning rate while training is running': 'howto/pause',
    'pause training in jupyter': 'howto/pause',
    'plot the learning curve': 'guides/05_metrics_history',
    'find a good learning rate': 'guides/04_schedules',
    'mixed precision bfloat16': 'howto/memory',
    'torch.compile is slow the first time': ('performance', 'guides/11_scale', 'howto/profile'),
    'custom loss with several outputs': 'howto/inputs_outputs',
    'train a gan with two optimizers': 'howto/two_optimizers',
    'imbalanced classes weighted f1': 'howto/class_imbalance',
    'log images of predictions': 'howto/logging',
    'my dataset is an iterable without length': (
        'howto/streams',
        'guides/08_evaluation_and_time',
        'checkpoints',
    ),
    'webdataset streaming': 'checkpoints',
    'progress bar too noisy in log file': ('howto/logging', 'guides/05_metrics_history'),
    'early stopping patience': 'howto/best_model',
    'write my own callback': 'guides/02_callbacks',
    'clip gradients by norm': 'howto/gradient_clipping',
    'exponential moving average of weights': ('guides/03_change_training', 'guides/11_scale'),
    'test time augmentation': 'howto/test_time_augmentation',
    'hyperparameter search optuna': 'howto/optuna',
    'compare two runs': 'howto/compare_runs',
    'which samples have the highest loss': ('howto/report', 'guides/01_quickstart', 'howto/rewind'),
    'why is my gpu idle data loading is slow': 'howto/profile',
}

# questions of a student, a researcher, an operator, a user of another library, one who deploys
USERS: dict[str, str | tuple[str, ...]] = {
    'kaggle notebook session died': ('howto/resume', 'howto/mirror', 'howto/pause'),
    'what does epoch train_loss valid_loss mean': (
        'guides/01_quickstart',
        'guides/05_metrics_history',
    ),
    'how do I predict on new images': (
        'howto/save_load',
        'guides/project_images',
        'guides/01_quickstart',
    ),
    'my accuracy is stuck': 'guides/10_debugging',
    'show a batch of pictures': ('guides/01_quickstart', 'guides/project_images'),
    'training diverged at step 1234 which batch': (
        'howto/rewind',
        'guides/12_time_travel',
        'guides/10_debugging',
    ),
    'bitwise identical seed': 'howto/reproducible',
    'loss exploded spike which row': ('howto/rewind', 'guides/12_time_travel'),
    'record gradients norm per layer': (
        'guides/10_debugging',
        'howto/gradient_clipping',
        'howto/logging',
    ),
    'two runs give different results find out why': 'howto/compare_runs',
    'sigterm from kubernetes save and exit': ('howto/resume', 'checkpoints', 'distributed'),
    'checkpoint to s3 bucket': 'howto/mirror',
    'is it safe to load a pickle checkpoint': (
        'checkpoints',
        'project/SECURITY',
        'howto/save_load',
    ),
    'disk full during save': ('faults', 'checkpoints'),
    'how do I monitor gpu utilization': ('howto/profile', 'howto/logging'),
    'lightning trainer equivalent': 'guides/from_lightning',
    'keras model.fit callbacks': 'guides/from_keras',
    'fastai fine_tune discriminative learning rates': (
        'guides/from_fastai',
        'howto/transfer_learning',
        'guides/04_schedules',
    ),
    'hf trainer arguments config yaml': 'guides/from_hf_trainer',
    'composer algorithms': 'guides/from_composer',
    'onnx dynamic axes': 'howto/export',
    'serve predictions with torchscript': 'howto/export',
    'incomplete last group of accumulation dropped': 'howto/memory',
    'quantize model': 'howto/export',
    'inference on cpu from gpu checkpoint': 'howto/save_load',
}

FIND = """query => {
    history.replaceState(null, '', '?q=' + encodeURIComponent(query));
    return Search._performSearch(...Search._parseQuery(query)).reverse().map(result => result[0]);
}"""


@pytest.mark.parametrize(
    'questions', [QUESTIONS, SENTENCES, USERS], ids=['words', 'sentences', 'users']
)
def test_a_question_leads_to_its_page(
    questions: dict[str, str | tuple[str, ...]], tab: Any, address: str
) -> None:
    tab.goto(f'{address}/search.html')
    tab.wait_for_function('Search.hasIndex()')
    found = {question: tab.evaluate(FIND, question) for question in questions}
    missed = {
        question: pages[: 2 * N_SHOWN]
        for question, pages in found.items()
        if not any(is_answer(page, questions[question]) for page in pages[:N_SHOWN])
    }
    assert not missed


def is_answer(page: str, expected: str | tuple[str, ...]) -> bool:
    "Return True for the page that answers a question, or one of several."
    return page in ([expected] if isinstance(expected, str) else expected)
