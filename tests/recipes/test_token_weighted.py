from types import SimpleNamespace

import pytest
import torch
from arguments import RecipeError
from loss_run import CONFIGS, DECODERS, SEED, build_model, examples, in_two_processes, masked, run
from masking import EVALUATION_MASK_SEED
from token_weighted import TokenMeanLoss, TokenWeightedTrainer
from torch.nn import functional


MODELS = [*CONFIGS, *DECODERS]
# More than the 13 held-out sequences: none of them fills a batch. Of training nothing is dropped, in steps of 32.
DROPPING = {"eval_batch": 16, "dataloader_drop_last": True}


def nats_and_tokens(model_type, data, epoch=0):
    """Sum of -log p over the predicted tokens, and their number, by hand: one sequence at a time, in float64."""
    model, before = build_model(model_type), int(model_type in DECODERS)
    model = model.double().eval()
    total, count, data.epoch = 0.0, 0, epoch
    for example in (data[index] for index in range(len(data))):
        with torch.no_grad():
            logits = model(input_ids=example["input_ids"][None]).logits[0]
        for place, label in enumerate(example["labels"].tolist()):
            if label != -100:
                total -= float(logits[place - before].log_softmax(-1)[label])
                count += 1
    return total, count


def gradient_norm(model_type, data):
    """Norm of the gradient of the mean over all predicted tokens, in one batch."""
    model = build_model(model_type).train()
    rows = data.__getitems__(range(len(data)))
    inputs, labels = (torch.stack([row[name] for row in rows]) for name in ("input_ids", "labels"))
    logits = model(input_ids=inputs).logits
    if model_type in DECODERS:
        logits, labels = logits[:, :-1], labels[:, 1:]
    functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return float(torch.stack([gradient.norm() for gradient in gradients]).norm())


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """One process, one batch of 32: computed once for each model."""
    results = {}

    def get(model_type):
        if model_type not in results:
            results[model_type] = run(model_type, 32, 1, tmp_path_factory.mktemp(model_type))
        return results[model_type]

    return get


def agree(result, reference):
    for name in ("loss", "grad_norm", "eval_loss"):
        assert len(result[name]) == len(reference[name]) >= 3
        assert result[name] == pytest.approx(reference[name], rel=1e-3), name
    assert result["eval_tokens"] == reference["eval_tokens"]


@pytest.mark.parametrize("model_type", MODELS)
def test_one_batch_logs_the_mean_over_tokens(model_type, reference):
    result, data = reference(model_type), examples(model_type, 32, SEED, 0)
    nats, tokens = nats_and_tokens(model_type, data)
    assert result["loss"][0] == pytest.approx(nats / tokens, rel=1e-4)
    assert result["grad_norm"][0] == pytest.approx(gradient_norm(model_type, data), rel=1e-3)
    if model_type in DECODERS:
        return
    # Epochs differ in their masks: else the steps after the first would not test them.
    other, count = nats_and_tokens(model_type, data, epoch=1)
    assert other / count != pytest.approx(nats / tokens, rel=2e-3)


@pytest.mark.parametrize("model_type", MODELS)
def test_accumulation_changes_nothing(model_type, reference, tmp_path):
    agree(run(model_type, 8, 4, tmp_path), reference(model_type))


@pytest.mark.parametrize("model_type", MODELS)
def test_held_out_loss_is_weighted_by_tokens(model_type, reference):
    nats, tokens = nats_and_tokens(model_type, examples(model_type, 13, EVALUATION_MASK_SEED, 1))
    result = reference(model_type)
    assert result["eval_loss"][0] == pytest.approx(nats / tokens, rel=1e-5)
    assert result["eval_tokens"] == [tokens] * 4


def test_held_out_loss_is_independent_of_batch_size_and_arguments(reference, tmp_path):
    for extra in ({"eval_batch": 13}, {"eval_batch": 5, "prediction_loss_only": True}, {"eval_batch": 1}, DROPPING):
        result = run("bert", 32, 1, tmp_path, steps=3, **extra)
        assert result["eval_loss"] == pytest.approx(reference("bert")["eval_loss"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", MODELS)
def test_two_processes_change_nothing(model_type, reference, tmp_path):
    file = tmp_path / "result.json"
    agree(in_two_processes(model_type, "16", "1", "32", "3", file=file), reference(model_type))


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["bert", "llama"])
def test_two_processes_over_epochs_that_end_within_a_step(model_type, tmp_path):
    """22 sequences in steps of 8: the last step of each of two epochs has 6, none of them twice. Accelerate would fill
    it from the start of the epoch. Resumed inside the second epoch as well."""
    reference = run(model_type, 8, 1, tmp_path / "one", sequences=22, steps=6)
    file = tmp_path / "result.json"
    for resume in ((), ("4",)):
        result = in_two_processes(model_type, "2", "2", "22", "6", *resume, file=file)
        agree(result, reference)
        assert result["fingerprint"] == reference["fingerprint"]
        assert result["fingerprint"]["sequences"] == 44
        assert result["epoch"] == reference["epoch"] == 2


def test_loss_function_by_hand():
    torch.manual_seed(0)
    logits = torch.randn(2, 3, 5)
    labels = torch.tensor([[1, -100, 4], [-100, -100, 0]])
    log_p = logits.log_softmax(-1)
    nats = -(log_p[0, 0, 1] + log_p[0, 2, 4] + log_p[1, 2, 0])
    loss = TokenMeanLoss()
    for outputs in ({"logits": logits}, (logits,)):
        assert loss(outputs, labels, num_items_in_batch=12).item() == pytest.approx(nats.item() / 12)
        assert loss(outputs, labels, torch.tensor(12)).item() == pytest.approx(nats.item() / 12)
        assert loss(outputs, labels).item() == pytest.approx(nats.item() / 3)


def test_next_tokens_by_hand():
    torch.manual_seed(0)
    logits = torch.randn(2, 3, 5)
    labels = torch.tensor([[-100, 1, 4], [-100, -100, 0]])
    log_p = logits.log_softmax(-1)
    nats = -(log_p[0, 0, 1] + log_p[0, 1, 4] + log_p[1, 1, 0])
    assert TokenMeanLoss(offset=1)({"logits": logits}, labels).item() == pytest.approx(nats.item() / 3)


def test_label_smoothing_is_that_of_the_trainer():
    from transformers.trainer_pt_utils import LabelSmoother

    torch.manual_seed(0)
    logits, labels = torch.randn(2, 3, 5), torch.tensor([[1, -100, 4], [-100, -100, 0]])
    expected = LabelSmoother(epsilon=0.1)({"logits": logits}, labels)
    assert TokenMeanLoss(0.1)({"logits": logits}, labels).item() == pytest.approx(expected.item())


def test_step_without_a_masked_token():
    logits = torch.randn(1, 3, 5, requires_grad=True)
    loss = TokenMeanLoss()({"logits": logits}, torch.full((1, 3), -100), torch.tensor(0))
    loss.backward()
    assert loss.item() == 0
    assert (logits.grad == 0).all()


@pytest.mark.parametrize("strategy", ["group_by_length", "batch_rebalance"])
def test_orders_by_length_are_refused(tmp_path, strategy):
    with pytest.raises(RecipeError, match=f"train_sampling_strategy='{strategy}': blocks are of one length"):
        run("bert", 8, 1, tmp_path, train_sampling_strategy=strategy)


def test_nothing_left_by_drop_last(tmp_path):
    with pytest.raises(RecipeError, match="32 training sequences are fewer than the 64 of one step"):
        run("bert", 32, 2, tmp_path, dataloader_drop_last=True)


def test_several_gpus_in_one_process_are_refused():
    with pytest.raises(RecipeError, match="--num_processes 4"):
        TokenWeightedTrainer(args=SimpleNamespace(n_gpu=4))


def test_held_out_set_without_masks(tmp_path):
    data = masked(3, 0, 0)
    data.make_examples.probability = 0.0
    from transformers import TrainingArguments, default_data_collator

    trainer = TokenWeightedTrainer(
        model=build_model("bert"),
        args=TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none"),
        eval_dataset=data,
        data_collator=default_data_collator,
    )
    with pytest.raises(RecipeError, match="no held-out token is masked"):
        trainer.evaluate()


def test_batches_split_over_processes_are_refused(tmp_path):
    """By accelerate's option a batch is that of all processes: ends of epochs are counted in those of each."""
    with pytest.raises(RecipeError, match="split_batches=true"):
        run("bert", 8, 1, tmp_path, accelerator_config={"split_batches": True})
