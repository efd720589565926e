"""Training loops that know nothing of ebb, beside the same loops without."""

import functools
import os
import re
import signal
import traceback

import pytest
import torch

import ebb
from conftest import new_model, run_python

EVERYTHING = {"device": "cpu", "policy": ebb.policies.offload_everything()}


def weights(model):
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def assert_equal(ours, plain):
    assert ours.keys() == plain.keys()
    assert all(torch.equal(ours[name], plain[name]) for name in ours)


def tokens():
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(64, (16, 24), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


@pytest.fixture
def llama():
    transformers = pytest.importorskip("transformers")

    def make():
        torch.manual_seed(5)
        config = transformers.LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
        return transformers.LlamaForCausalLM(config)

    return make


def arguments_for_transformers(folder, **named):
    import transformers

    return transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=4,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=3,
        **named,
    )


def weights_trained_by_transformers(model, folder, **named):
    import transformers

    arguments = arguments_for_transformers(folder, save_strategy="no", **named)
    transformers.Trainer(model=model, args=arguments, train_dataset=tokens()).train()
    return weights(model)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_transformers_trainer_with_a_llama_is_exact(llama, tmp_path, checkpointing):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    def train(model):
        return weights_trained_by_transformers(model, tmp_path, gradient_checkpointing=checkpointing)

    plain = train(llama())
    model = llama()
    offloader = ebb.wrap(model, **EVERYTHING)
    assert_equal(train(model), plain)
    assert offloader.stats().offloaded.tensors > 0
    assert offloader.stats().pool.now_bytes == 0


def test_transformers_trainer_with_managed_parameters_is_exact(llama, tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    plain = weights_trained_by_transformers(llama(), tmp_path)
    model = llama()
    offloader = ebb.wrap(model, **EVERYTHING)
    offloader.manage(model, device_bytes="64KiB", minimum_bytes=0)
    assert_equal(weights_trained_by_transformers(model, tmp_path), plain)
    assert offloader.stats().managed.tensors > 0


def test_blocks_that_run_again_where_the_plan_says_so_are_exact(llama):
    batch = torch.stack([each["input_ids"] for each in tokens()])

    def gradients(prepare):
        model = llama()
        report = prepare(model)
        for _ in range(6):
            model.zero_grad()
            model(input_ids=batch, labels=batch).loss.backward()
        return {name: weight.grad for name, weight in model.named_parameters()}, report()

    def with_regions(model):
        for block in model.model.layers:
            block.forward = functools.partial(ebb.checkpoint, block.forward)
        return ebb.wrap(model, device="cpu", least_memory=True, planned_minimum_bytes=1, capacity_bytes=4096).explain

    plain, _ = gradients(lambda model: str)
    ours, plan = gradients(with_regions)
    assert_equal(ours, plain)
    assert re.search(r" recompute +less", plan), plan


def test_a_llama_keeps_its_head_and_its_loss(llama):
    def saved(keep):
        model = llama()
        offloader = ebb.wrap(model, keep=keep, **EVERYTHING)
        batch = torch.stack([each["input_ids"] for each in tokens()])
        model(input_ids=batch, labels=batch).loss.backward()
        return offloader.stats().saved.tensors

    assert saved(None) == saved(["lm_head"]) < saved([])


def test_accelerate_is_exact():
    accelerate = pytest.importorskip("accelerate")

    def train(wrap):
        model = new_model()
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        rows = torch.randn(32, 16, generator=torch.Generator().manual_seed(1))
        model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(rows, batch_size=4))
        offloader = ebb.wrap(model, **EVERYTHING) if wrap else None
        torch.manual_seed(4)
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).square().mean())
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        assert offloader is None or offloader.stats().offloaded.tensors > 0
        return weights(accelerator.unwrap_model(model))

    assert_equal(train(True), train(False))


def lightning_trainer(lightning, folder, **options):
    return lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **options,
    )


def weights_trained_by_lightning(make_offloader, folder, calls_forward=True):
    """And what make_offloader(module) has returned."""
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = new_model()

        def forward(self, batch):
            return self.model(batch)

        def training_step(self, batch, index):
            return (self(batch) if calls_forward else self.model(batch)).square().mean()

        def validation_step(self, batch, index):  # which Lightning calls before the first training_step
            self(batch)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.05)

    module = Module()
    offloader = make_offloader(module)
    rows = torch.randn(32, 16, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(4)
    trainer = lightning_trainer(lightning, folder, enable_checkpointing=False)
    loader = torch.utils.data.DataLoader(rows, batch_size=8)
    trainer.fit(module, loader, loader)
    return weights(module), offloader


@pytest.mark.parametrize("wrap", [lambda module: module.model, lambda module: module])
def test_lightning_is_exact(wrap, tmp_path, recwarn):
    plain, _ = weights_trained_by_lightning(lambda module: None, tmp_path)
    ours, offloader = weights_trained_by_lightning(lambda module: ebb.wrap(wrap(module), **EVERYTHING), tmp_path)
    assert_equal(ours, plain)
    assert offloader.stats().offloaded.tensors > 0
    assert not [each for each in recwarn if "ebb.wrap" in str(each.message)]


def test_lightning_that_does_not_call_what_is_wrapped_gets_a_warning(tmp_path):
    with pytest.warns(UserWarning, match="training_step"):
        _, offloader = weights_trained_by_lightning(lambda module: ebb.wrap(module, **EVERYTHING), tmp_path, False)
    assert offloader.stats().saved.tensors == 0


KILLED_AND_RESUMED = [
    ("disk", torch.float32, torch.optim.AdamW),
    ("host", torch.float32, ebb.AdamW),
    ("disk", torch.bfloat16, ebb.AdamW),
    ("host", torch.bfloat16, torch.optim.AdamW),
]


def assert_a_killed_run_is_resumed(train, home, folder):
    """`train(folder, manage, kill, resume)` saves to the folder on its way, is killed later, and returns weights at its end."""

    def manage(model):
        offloader = ebb.wrap(model, keep=[], **EVERYTHING, home=home)
        offloader.manage(model, device_bytes="4KiB", minimum_bytes=0)
        assert offloader.stats().managed.tensors > 0

    def kill():
        os.kill(os.getpid(), signal.SIGKILL)

    expected = train(folder / "plain", lambda model: None, lambda: None, False)
    child = os.fork()
    if child == 0:
        try:
            train(folder / "managed", manage, kill, False)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert_equal(train(folder / "managed", manage, lambda: None, True), expected)


def without_dropout():
    """Lightning saves no random state, and accelerate draws from it to resume."""
    model = new_model()
    model.body[5].p = 0.0
    return model


@pytest.mark.parametrize(("home", "dtype", "optimizer"), KILLED_AND_RESUMED)
def test_transformers_trainer_resumes_managed_parameters(llama, tmp_path, home, dtype, optimizer):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    def train(folder, manage, kill, resume):
        class Kill(transformers.TrainerCallback):
            def on_step_end(self, args, state, control, **named):
                if state.global_step == 3:
                    kill()

        model = llama().to(dtype)
        manage(model)
        trainer = transformers.Trainer(
            model=model,
            args=arguments_for_transformers(folder, save_strategy="steps", save_steps=2),
            train_dataset=tokens(),
            optimizers=(optimizer(model.parameters(), lr=1e-2), None),
            callbacks=[Kill()],
        )
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2") if resume else None)
        return weights(model)

    assert_a_killed_run_is_resumed(train, home, tmp_path)


@pytest.mark.parametrize(("home", "dtype", "optimizer"), KILLED_AND_RESUMED)
def test_accelerate_resumes_managed_parameters(tmp_path, home, dtype, optimizer):
    accelerate = pytest.importorskip("accelerate")

    def train(folder, manage, kill, resume):
        model = without_dropout().to(dtype)
        manage(model)
        accelerator = accelerate.Accelerator(cpu=True)
        rows = torch.randn(24, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
        model, its, loader = accelerator.prepare(
            model, optimizer(model.parameters(), lr=1e-2), torch.utils.data.DataLoader(rows, batch_size=4)
        )
        if resume:
            accelerator.load_state(str(folder))
            loader = accelerator.skip_first_batches(loader, 3)
        for number, batch in enumerate(loader, 3 if resume else 0):
            accelerator.backward(model(batch).float().square().mean())
            its.step()
            its.zero_grad()
            if number == 2:
                accelerator.save_state(str(folder))
                kill()
        return weights(accelerator.unwrap_model(model))

    assert_a_killed_run_is_resumed(train, home, tmp_path)


@pytest.mark.parametrize(("home", "dtype", "optimizer"), KILLED_AND_RESUMED)
def test_lightning_resumes_managed_parameters(tmp_path, home, dtype, optimizer):
    lightning = pytest.importorskip("lightning")

    def train(folder, manage, kill, resume):
        class Module(lightning.LightningModule):
            def __init__(self):
                super().__init__()
                self.model = without_dropout().to(dtype)

            def training_step(self, batch, index):
                if self.current_epoch == 1 and index == 1:
                    kill()
                return self.model(batch).float().square().mean()

            def configure_optimizers(self):
                return optimizer(self.parameters(), lr=1e-2)

        module = Module()
        manage(module.model)
        rows = torch.randn(32, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
        trainer = lightning_trainer(lightning, folder)
        loader = torch.utils.data.DataLoader(rows, batch_size=8)
        saved = folder / "checkpoints" / "epoch=0-step=4.ckpt"
        trainer.fit(module, loader, ckpt_path=saved if resume else None)
        return weights(module)

    assert_a_killed_run_is_resumed(train, home, tmp_path)


PROGRAM = """
import os, sys
sys.path.insert(0, {tests!r})
import torch, ebb
from conftest import new_model
torch.set_num_threads(1)

def train(rank, order, port, folder):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    results = []
    for wrap in (False, True):
        model = new_model().eval()
        if wrap and order in ("inside", "managed"):
            offloader = ebb.wrap(model, device="cpu", policy=ebb.policies.offload_everything())
        if wrap and order == "managed":
            offloader.manage(model, device_bytes="2KiB", minimum_bytes=0)
            assert offloader.stats().managed.tensors > 0
        parallel = torch.nn.parallel.DistributedDataParallel(model)
        if wrap and order == "outside":
            offloader = ebb.wrap(parallel, device="cpu", policy=ebb.policies.offload_everything())
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.05)
        if wrap and order == "managed":
            optimizer = ebb.SGD(parallel.parameters(), lr=0.05)
        rows = torch.randn(24, 16, generator=torch.Generator().manual_seed(rank))
        for _ in range(4):
            optimizer.zero_grad()
            parallel(rows).square().mean().backward()
            optimizer.step()
        results.append([each.detach().clone() for each in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results))
    assert offloader.stats().offloaded.tensors > 0
    torch.save(results[1], os.path.join(folder, str(rank)))
    torch.distributed.destroy_process_group()

if __name__ == "__main__":
    processes = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            train(rank, {order!r}, {port}, {folder!r})
            sys.stdout.flush()
            os._exit(0)
        processes.append(child)
    assert all(os.waitpid(each, 0)[1] == 0 for each in processes)
    ranks = [torch.load(os.path.join({folder!r}, str(rank))) for rank in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*ranks))
    print("done")
"""


@pytest.mark.parametrize("order", ["inside", "outside", "managed"])
def test_two_processes_of_distributed_data_parallel_are_exact(order, tmp_path):
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = PROGRAM.format(tests=os.path.dirname(__file__), order=order, port=port, folder=str(tmp_path))
    assert run_python(program).splitlines()[-1] == "done"
