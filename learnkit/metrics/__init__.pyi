# SPDX-License-Identifier: Apache-2.0

from .averages import (
    AvgLoss as AvgLoss,
    AvgMetric as AvgMetric,
    SumMetric as SumMetric,
    TorchMetric as TorchMetric,
    ValueMetric as ValueMetric,
    as_metrics as as_metrics,
    check_column as check_column,
    dry_run as dry_run,
    measures_batches as measures_batches,
)
from .base import (
    AvgSmoothLoss as AvgSmoothLoss,
    Mean as Mean,
    Metric as Metric,
)
from .classification import (
    BalancedAccuracy as BalancedAccuracy,
    CohenKappa as CohenKappa,
    F1Score as F1Score,
    F1ScoreMulti as F1ScoreMulti,
    FBeta as FBeta,
    FBetaMulti as FBetaMulti,
    HammingLoss as HammingLoss,
    HammingLossMulti as HammingLossMulti,
    Jaccard as Jaccard,
    JaccardMulti as JaccardMulti,
    MatthewsCorrCoef as MatthewsCorrCoef,
    MatthewsCorrCoefMulti as MatthewsCorrCoefMulti,
    Precision as Precision,
    PrecisionMulti as PrecisionMulti,
    Recall as Recall,
    RecallMulti as RecallMulti,
)
from .functional import (
    RMSE as RMSE,
    BrierScore as BrierScore,
    BrierScoreMulti as BrierScoreMulti,
    ElementMean as ElementMean,
    ExplainedVariance as ExplainedVariance,
    ExpRMSPE as ExpRMSPE,
    PearsonCorrCoef as PearsonCorrCoef,
    Perplexity as Perplexity,
    R2Score as R2Score,
    accuracy as accuracy,
    accuracy_multi as accuracy_multi,
    error_rate as error_rate,
    exp_rmspe as exp_rmspe,
    mae as mae,
    mse as mse,
    msle as msle,
    perplexity as perplexity,
    rmse as rmse,
    top_k_accuracy as top_k_accuracy,
)
from .ranking import (
    APScoreBinary as APScoreBinary,
    APScoreMulti as APScoreMulti,
    CorpusBLEUMetric as CorpusBLEUMetric,
    RocAuc as RocAuc,
    RocAucBinary as RocAucBinary,
    RocAucMulti as RocAucMulti,
    SpearmanCorrCoef as SpearmanCorrCoef,
)
from .segmentation import (
    Dice as Dice,
    DiceMulti as DiceMulti,
    ForegroundAcc as ForegroundAcc,
    JaccardCoeff as JaccardCoeff,
    JaccardCoeffMulti as JaccardCoeffMulti,
    foreground_acc as foreground_acc,
)
from .whole_set import (
    AccumMetric as AccumMetric,
    LossMetric as LossMetric,
    LossMetrics as LossMetrics,
    skm_to_fastai as skm_to_fastai,
)
