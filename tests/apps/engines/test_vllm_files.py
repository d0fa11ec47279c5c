"""The file that runs in vLLM loads passages as PyTorch does, and refuses what does not fit. Needs no vLLM."""

import json
import random
import shutil
from types import SimpleNamespace

import pytest
import torch
from conftest import aligner_for, processor_with
from safetensors.torch import load_file, save_file
from stub_vllm import Role, Spec, load_slots_module
from transformers import AutoModelForCausalLM, DynamicCache

from arcaligner import ArcAlignerForCausalLM
from arcaligner.answering_arcaligner import copied_next, copied_texts
from arcaligner.apps.server.vllm_engine import copy_field, slots_request
from arcaligner.kv_cache_arcaligner import base_model_fingerprint, from_int8

slots = load_slots_module()

QUESTION = "Who wrote it?"
ADA = {"title": "Ada", "text": "Ada wrote the letter in 1843. It was long, and she read it aloud."}
RADIK = "Radik Zhaparov is a Kazakh ski jumper."
DOCUMENTS = [ADA, RADIK, ADA]  # one of them twice
BLOCK = 4


@pytest.fixture(scope="module", params=["start", "end"])
def aligner(base_model_dir, processor, request):
    """An aligner of independent passages around a base model that is saved in a folder."""
    settings = {"encoder_name_or_path": processor.encoder_name_or_path, "encoder_hidden_size": 12}
    settings |= {"context_token_id": processor.context_token_id, "passage_attention": "separate", "lora_r": 4}
    settings["passage_alignment"] = request.param
    model = ArcAlignerForCausalLM.from_pretrained(str(base_model_dir), **settings).eval()
    return model, processor_with(processor, passage_attention="separate", tokens_per_slot=3)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(slots.FOLDER, str(tmp_path))
    return tmp_path


@pytest.fixture
def cache(aligner, folder):
    return aligner[0].passage_cache(aligner[1], folder=folder)


@pytest.fixture
def files(cache):
    return cache.prefix_files(QUESTION, DOCUMENTS)[0]


def engine_config(model, base_model_dir, **changes):
    text = model.config.text_config
    config = SimpleNamespace(
        model_type="llama",
        num_hidden_layers=text.num_hidden_layers,
        num_key_value_heads=text.num_key_value_heads,
        num_attention_heads=text.num_attention_heads,
        hidden_size=text.hidden_size,
        head_dim=getattr(text, "head_dim", None),
        rope_parameters=dict(text.rope_parameters),
    )
    settings = {"policy": "fail", "guard": ["arcaligner_slots:SlotsLogitsProcessor"], "spec": Spec(BLOCK)}
    settings |= {"dtype": torch.float32, "extra": {}} | changes
    vars(config).update(settings.pop("config", {}))
    model_config = SimpleNamespace(
        hf_text_config=config,
        dtype=settings["dtype"],
        logits_processors=settings["guard"],
        model=str(base_model_dir),
        revision=None,
    )
    transfer = SimpleNamespace(kv_load_failure_policy=settings["policy"], get_from_extra_config=settings["extra"].get)
    groups = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=settings["spec"])])
    return SimpleNamespace(model_config=model_config, kv_transfer_config=transfer), groups


@pytest.fixture
def connect(aligner, base_model_dir):
    def make(role=Role.SCHEDULER, **changes):
        config, groups = engine_config(aligner[0], base_model_dir, **changes)
        return slots.SlotsConnector(config, role, groups)

    return make


def request_of(body, name="one"):
    return SimpleNamespace(
        request_id=name,
        kv_transfer_params=body["kv_transfer_params"],
        prompt_token_ids=body["prompt"],
        cache_salt=body["cache_salt"],
        num_tokens=len(body["prompt"]),
    )


# Files


def test_prefix_files_keep_order(cache, files, aligner):
    keys = [path.stem for path in files.paths]
    assert len(set(keys)) == 3 and keys[1] == keys[3] and (files.num_passages, files.num_cached) == (3, 0)
    inputs = cache.prepare(QUESTION, documents=DOCUMENTS)
    parts = [load_file(path)["keys_values"] for path in files.paths]
    assert [part.shape[3] for part in parts] == files.num_slots
    for number, layer in enumerate(inputs["past_key_values"].layers):
        assert torch.equal(torch.cat(parts, dim=3)[number, 1], layer.values[0])
    length = inputs["input_ids"].shape[1]
    assert len(files.prefix_ids) + sum(files.num_slots[1:]) + len(files.suffix_ids) == length
    cut = cache.prefix_files(QUESTION, DOCUMENTS, max_slots=files.num_slots[1] + 1)[0]
    assert cut.num_slots == [*files.num_slots[:2], 1] and cut.num_cached == 3


def test_lost_files_are_written_again(cache, files):
    files.paths[1].unlink()
    save_file(load_file(files.paths[2]), files.paths[2], {"format": slots.FORMAT})  # as version 0.2
    again = cache.prefix_files(QUESTION, DOCUMENTS)[0]
    assert again.paths == files.paths
    slots.check_slots(slots_request(again)["kv_transfer_params"]["slots"])


def test_full_disk_is_named(cache, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("arcaligner.kv_cache_arcaligner.save_keys_values", full)
    with pytest.raises(OSError, match=r"safetensors could not be written\. Check that"):
        cache.prefix_files(QUESTION, DOCUMENTS)


def test_base_model_has_one_digest(aligner, base_model_dir, tmp_path):
    """The digest is the same for the aligner and for files of the base model in float32 and in bfloat16."""
    model, _ = aligner
    expected = base_model_fingerprint(model)["weights"]
    AutoModelForCausalLM.from_pretrained(base_model_dir, dtype=torch.bfloat16).save_pretrained(tmp_path)
    assert slots.base_model_digest(base_model_dir) == slots.base_model_digest(tmp_path) == expected
    other = AutoModelForCausalLM.from_pretrained(base_model_dir)
    other.model.layers[1].mlp.up_proj.weight.data[0, 0] += 1
    other.save_pretrained(tmp_path)
    assert slots.base_model_digest(tmp_path) != expected


def test_int8_files_are_read(aligner, folder):
    (files,) = aligner[0].passage_cache(aligner[1], folder=folder, dtype="int8").prefix_files(QUESTION, [ADA])
    kept, key = load_file(files.paths[1])["keys_values"], files.paths[1].stem
    assert kept.dtype == torch.int8
    values = slots.Passages(0, slice(0, 2)).read([key])[key]
    assert torch.equal(values, from_int8(kept, torch.float32).transpose(2, 3))


def cut(path):
    path.write_bytes(path.read_bytes()[:-9])


def damage(path):
    data = bytearray(path.read_bytes())
    data[-3] ^= 64
    path.write_bytes(bytes(data))


def lose(path):
    path.rename(path.with_name(f".{path.name}.tmp"))  # like a file that is being written


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lose, "does not exist .No such file"),
        (cut, "cannot be used: .*deserializ"),
        (lambda path: path.write_bytes(b""), "cannot be used"),
        (lambda path: save_file(load_file(path), path), "its format is None"),
        (lambda path: save_file(load_file(path), path, {"format": slots.FORMAT}), "does not name its base model"),
        (
            lambda path: save_file(load_file(path), path, {"format": slots.FORMAT, "base_model": "{}"}),
            "it has no entry 'fingerprint'",
        ),
        (
            lambda path: shutil.copy(next(p for p in path.parent.iterdir() if p != path), path),
            "name does not match the `fingerprint`",
        ),
    ],
)
def test_broken_files_are_named(change, message, files):
    body = slots_request(files)["kv_transfer_params"]
    params = SimpleNamespace(
        extra_args={"kv_transfer_params": body}, prompt_logprobs=None, skip_reading_prefix_cache=None
    )
    slots.SlotsLogitsProcessor.validate_params(params)
    change(files.paths[1])
    with pytest.raises(ValueError, match=message) as error:
        slots.SlotsLogitsProcessor.validate_params(params)
    assert files.paths[1].name in str(error.value)


@pytest.mark.parametrize("max_bytes", [0, 2**30])
def test_damaged_values_are_refused(max_bytes, files):
    """A file that was damaged or lost after its first load is refused, whether or not its values are in memory."""
    passages, key = slots.Passages(max_bytes, slice(0, 2)), files.paths[1].stem
    assert isinstance(passages.read([key])[key], torch.Tensor)
    damage(files.paths[1])
    slots.check_slots([[files.paths[0].stem, files.num_slots[0]], [key, 1]])  # the header is whole
    assert "do not match the digest" in str(passages.read([key])[key])
    lose(files.paths[1])
    assert "does not exist" in str(passages.read([key])[key])


def test_passages_stay_in_memory(files, monkeypatch):
    """A number of bytes of passages stays in memory; the least recently used go first, larger ones are not kept."""
    read_keys, keys = [], list(dict.fromkeys(path.stem for path in files.paths))
    monkeypatch.setattr(
        slots, "_read_values", lambda key, header, real=slots._read_values: read_keys.append(key) or real(key, header)
    )
    sizes = {key: slots.Passages(0, slice(0, 2)).read([key])[key].nbytes for key in keys}
    head, ada, radik = keys
    passages = slots.Passages(sizes[head] + sizes[ada], slice(0, 2))
    for requested, expected in (([head, ada, ada], [head, ada]), ([ada, head], []), ([radik], [radik]), ([head], [])):
        read_keys.clear()
        loaded = passages.read(requested)
        assert read_keys == expected and loaded.keys() == set(requested)
    assert sizes[radik] < sizes[ada] and passages.bytes == sizes[head] + sizes[radik]
    read_keys.clear()
    passages.read([ada])
    assert read_keys == [ada]
    small = slots.Passages(sizes[head] - 1, slice(0, 2))
    small.read([head])
    assert small.bytes == 0


def foreign(files, aligner, folder):
    """The key of the same passage from an aligner with another LoRA."""
    model, processor = aligner
    layer = next(parameter for name, parameter in model.aligner_parameters() if "lora_B" in name)
    layer.data += 0.5
    try:
        (other,) = model.passage_cache(processor, folder=folder).prefix_files(QUESTION, DOCUMENTS)
    finally:
        layer.data -= 0.5
    return other.paths[1].stem


def other_alignment(files, aligner, folder, monkeypatch):
    """The key of the same passage from an aligner that differs only in where passages are."""
    other = {"start": "end", "end": "start"}[aligner[0].config.passage_alignment]
    with monkeypatch.context() as patched:
        patched.setattr(aligner[0].config, "passage_alignment", other)
        (prefix,) = aligner[0].passage_cache(aligner[1], folder=folder).prefix_files(QUESTION, DOCUMENTS)
    return prefix.paths[1].stem


def test_mismatched_requests_are_refused(files, aligner, folder, monkeypatch):
    body = slots_request(files)["kv_transfer_params"]["slots"]
    (other_prompt,) = (
        aligner[0]
        .passage_cache(aligner[1], folder=folder)
        .prefix_files(
            [[{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]], [DOCUMENTS]
        )
    )
    for pairs, message in (
        (None, "`slots` is None; expected"),
        ([], r"`slots` is \[\]; expected"),
        ([["a" * 64]], r"`slots` is \[\[\'a.*a\'\]\]; expected"),
        ([[body[0][0], True]], "`slots` is .* True.*; expected"),
        ([["../../secret", 1]], "is not the key of a precomputed passage"),
        ([body[0], [body[1][0], body[1][1] + 1]], "`slots` asks for"),
        (body[1:], "`slots` is in the wrong order"),
        ([body[0], body[0]], "`slots` is in the wrong order"),
        (
            [[body[0][0], 1], body[1]],
            "asks for 1 tokens of the text before the passages; expected .*, the number",
        ),
        ([body[0], [foreign(files, aligner, folder), 1]], "belong together: they differ in `aligner_weights`"),
        ([body[0], [other_prompt.paths[1].stem, 1]], "belong together: they differ in `prompt`"),
        (
            [body[0], [other_alignment(files, aligner, folder, monkeypatch), 1]],
            "belong together: they differ in `passage_alignment`",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            slots.check_slots(pairs)
    for extra, options, message in (
        ({"slot": body}, {}, "expected only `slots` and `copy`"),
        ({"slots": body}, {"prompt_logprobs": 1}, "neither `prompt_logprobs` nor"),
        ({"slots": body}, {"skip_reading_prefix_cache": True}, "nor `skip_reading_prefix_cache`"),
        ({"copy": {"bonus": 8, "texts": [[1]], "end_ids": []}}, {}, "`copy` is malformed"),
    ):
        params = {"prompt_logprobs": None, "skip_reading_prefix_cache": None} | options
        with pytest.raises(ValueError, match=message):
            slots.SlotsLogitsProcessor.validate_params(
                SimpleNamespace(extra_args={"kv_transfer_params": extra}, **params)
            )


def test_joint_passages_are_one_file(processor, folder):
    model = aligner_for(processor, passage_attention="joint", dtype=torch.float32)
    (files,) = model.passage_cache(processor, folder=folder).prefix_files(QUESTION, [ADA, RADIK])
    body = slots_request(files)["kv_transfer_params"]["slots"]
    assert len(slots.check_slots(body)) == 2
    with pytest.raises(ValueError, match="`slots` names 3 files; expected two"):
        slots.check_slots([*body, body[1]])


def test_lora_on_text_is_refused(processor, folder):
    model = aligner_for(processor, passage_attention="separate", lora_positions="all", dtype=torch.float32)
    apart = processor_with(processor, passage_attention="separate")
    (files,) = model.passage_cache(apart, folder=folder).prefix_files(QUESTION, [ADA])
    with pytest.raises(ValueError, match="has `lora_positions` 'all'"):
        slots.check_slots(slots_request(files)["kv_transfer_params"]["slots"])


# The scheduler's side


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"extra": {"passage_bytes": -1}}, "`passage_bytes` is -1"),
        ({"policy": "recompute"}, "`kv_load_failure_policy` is 'recompute'; expected 'fail'"),
        ({"guard": None}, "Start it with `--logits-processors"),
        ({"spec": Spec(BLOCK, sliding_window=64)}, "expected only layers that attend to all positions"),
        ({"spec": SimpleNamespace()}, "expected only layers that attend to all positions"),
        (
            {"config": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}},
            "has `rope_type` 'dynamic'; expected",
        ),
        (
            {"config": {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}},
            "has `rope_type` 'longrope'; expected",
        ),
        ({"config": {"rope_parameters": None}}, "has no `rope_theta`; expected"),
    ],
)
def test_unsuitable_engines_are_refused(connect, changes, message):
    with pytest.raises(ValueError, match=message):
        connect(**changes)


def ask(connector, request, computed=0):
    return connector.get_num_new_matched_tokens(request, computed)


def test_slots_exclude_computed_positions(connect, files):
    connector, request = connect(), request_of(slots_request(files))
    total = sum(files.num_slots)
    assert ask(connector, request) == (total, False)
    assert ask(connector, request, BLOCK) == (total - BLOCK, False)
    assert ask(connector, request, len(request.prompt_token_ids) - 1) == (0, False)
    assert ask(connector, SimpleNamespace(kv_transfer_params=None)) == (0, False)


def load_of(body, start, blocks):
    return slots.Load(body, slots.moves_of(body, slots.check_slots(body)), start, blocks)


def step(connector, new=(), resumed=()):
    cached = SimpleNamespace(
        req_ids=[name for name, _ in resumed],
        resumed_req_ids={name for name, _ in resumed},
        new_block_ids=[(blocks,) for _, blocks in resumed],
    )
    new = [SimpleNamespace(req_id=name, block_ids=(blocks,)) for name, blocks in new]
    return connector.build_connector_meta(SimpleNamespace(scheduled_new_reqs=new, scheduled_cached_reqs=cached))


def test_preempted_requests_are_loaded_again(connect, files):
    connector, request = connect(), request_of(slots_request(files))
    for kind, start in (("new", 0), ("resumed", BLOCK)):
        number, _ = ask(connector, request, start)
        connector.update_state_after_alloc(request, None, number)
        meta = step(connector, **{kind: [("one", [5, 2, 9])]})
        body = request.kv_transfer_params["slots"]
        assert meta.loads == [load_of(body, start, [5, 2, 9])] and not meta.refused
    assert step(connector, resumed=[("other", [1])]).loads == []


@pytest.mark.parametrize(
    ("change", "engine", "message"),
    [
        ({"prompt": lambda ids: [ids[0] + 1, *ids[1:]]}, {}, "does not begin with the text"),
        ({"prompt": lambda ids: ids[:4]}, {}, "The prompt has 4 token ids"),
        ({"cache_salt": lambda salt: None}, {}, "`cache_salt` does not match `slots`"),
        ({"cache_salt": lambda salt: salt[::-1]}, {}, "`cache_salt` does not match `slots`"),
        ({}, {"num_hidden_layers": 5}, "layers, 2, heads, head_dim"),
        ({}, {"head_dim": 4}, "layers, 2, heads, head_dim"),
        ({}, {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, "a different base model: its `rope`"),
        ({}, {"model_type": "cohere"}, "with several independent passages, expected one of the types llama"),
    ],
)
def test_mismatched_requests_fail(connect, files, change, engine, message, caplog):
    body = slots_request(files)
    body |= {name: edit(body[name]) for name, edit in change.items()}
    connector, request = connect(config=engine), request_of(body)
    # The whole prompt counts as being loaded, so that nothing is computed.
    assert ask(connector, request) == (len(body["prompt"]), True)
    assert message in caplog.text
    connector.update_state_after_alloc(request, None, len(body["prompt"]))
    meta = step(connector)
    assert meta.refused == {"one"} and meta.loads == []
    worker = connect(Role.WORKER)
    worker.bind(meta)
    worker.start_load_kv(SimpleNamespace(no_compile_layers={}))
    results = worker.get_transfer_results(set())
    assert results.failed_recving == results.finished_recving == {"one"}
    assert worker.get_transfer_results(set()).failed_recving == set() and step(connector).refused == set()


def test_other_base_weights_are_refused(connect, files, base_model_dir, tmp_path_factory, caplog):
    folder = tmp_path_factory.mktemp("other")
    other = AutoModelForCausalLM.from_pretrained(base_model_dir)
    other.model.embed_tokens.weight.data[3] += 1
    other.save_pretrained(folder)
    connector = connect()
    connector._base_model["weights"] = slots.base_model_digest(folder)
    assert ask(connector, request_of(slots_request(files)))[1]
    assert "a different base model: its `weights`" in caplog.text


# The worker's side


class Layer:
    """An attention layer with a KV cache of its own."""

    def __init__(self, num_blocks, heads, head_dim, dtype):
        self.kv_cache, self.impl = torch.zeros(num_blocks * BLOCK, 2, heads, head_dim, dtype=dtype), self

    def do_kv_cache_update(self, layer, keys, values, cache, mapping):
        assert layer is self and cache is self.kv_cache
        cache[mapping, 0], cache[mapping, 1] = keys, values


def load(worker, model, *loads, heads=None, dtype=torch.float32):
    """The KV cache after a worker has loaded in one step, for each layer (num_blocks * BLOCK, 2, heads, head_dim)."""
    text = model.config.text_config
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    layers = {
        f"model.layers.{number}.self_attn.attn": Layer(40, heads or text.num_key_value_heads, head_dim, dtype)
        for number in range(text.num_hidden_layers)
    }
    worker.bind(slots.SlotsMetadata(loads=list(loads)))
    worker.start_load_kv(SimpleNamespace(no_compile_layers={**layers, "mlp": SimpleNamespace()}))
    return torch.stack([layer.kv_cache for layer in layers.values()])


@pytest.mark.parametrize("start", [0, BLOCK, 6 * BLOCK])
@torch.no_grad()
def test_base_model_continues_from_files(start, connect, cache, files, base_model_dir, aligner):
    """With consecutive positions, as in vLLM, the logits of the base model after the files are those of the aligner."""
    expected = cache.prefill_suffix(cache.prepare(QUESTION, documents=DOCUMENTS)).logits[0, -1]
    total, blocks = sum(files.num_slots), random.Random(1).sample(range(40), -(-sum(files.num_slots) // BLOCK))
    body = slots_request(files)["kv_transfer_params"]["slots"]
    pages = load(connect(Role.WORKER), aligner[0], load_of(body, start, blocks))
    at = torch.arange(total)
    rows = pages[:, torch.tensor(blocks)[at // BLOCK] * BLOCK + at % BLOCK]  # (layers, total, 2, heads, head_dim)
    assert not rows[:, :start].any() and (pages.abs().sum((0, 2, 3, 4)) > 0).sum() == total - start
    whole = load(connect(Role.WORKER), aligner[0], load_of(body, 0, blocks))
    rows[:, :start] = whole[:, torch.tensor(blocks)[at // BLOCK] * BLOCK + at % BLOCK][:, :start]
    base, past = AutoModelForCausalLM.from_pretrained(base_model_dir).eval(), DynamicCache()
    for number, row in enumerate(rows):
        keys, values = row.permute(1, 2, 0, 3)[:, None]
        past.update(keys, values, number)
    positions = torch.arange(total, total + len(files.suffix_ids))[None]
    logits = base(input_ids=torch.tensor([files.suffix_ids]), past_key_values=past, position_ids=positions).logits[
        0, -1
    ]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


def test_workers_write_their_own_heads(connect, files, aligner, monkeypatch):
    model, body = aligner[0], slots_request(files)["kv_transfer_params"]["slots"]
    heads, blocks = model.config.text_config.num_key_value_heads, list(range(40))
    assert heads == 2
    whole = load(connect(Role.WORKER), model, load_of(body, 0, blocks))
    for world, local_heads in ((2, 1), (4, 1)):
        for rank in range(world):
            vars(slots.parallel).update(world=world, rank=rank)
            local = load(connect(Role.WORKER), model, load_of(body, 0, blocks), heads=local_heads)
            first = rank * heads // world
            assert torch.equal(local, whole[:, :, :, first : first + local_heads])
    vars(slots.parallel).update(world=1, rank=0)
    half = load(connect(Role.WORKER, dtype=torch.bfloat16), model, load_of(body, 0, blocks), dtype=torch.bfloat16)
    assert torch.equal(half, whole.bfloat16())


def test_step_writes_all_requests(connect, cache, aligner):
    """In one step each request is loaded as if it were alone, whatever was loaded before."""
    document_lists = [DOCUMENTS, [RADIK], [RADIK, ADA]]
    prefixes = [cache.prefix_files(QUESTION, documents)[0] for documents in document_lists]
    bodies = [slots_request(prefix)["kv_transfer_params"]["slots"] for prefix in prefixes]
    starts, free = (0, BLOCK, sum(count for _, count in bodies[2][:2]) + 1), iter(range(40))
    loads = []
    for body, start in zip(bodies, starts, strict=True):
        needed = -(-sum(count for _, count in body) // BLOCK)
        loads.append(load_of(body, start, [next(free) for _ in range(needed)]))
    together, worker = load(connect(Role.WORKER), aligner[0], *loads), connect(Role.WORKER)
    alone = [load(worker, aligner[0], single) for single in loads]
    assert all(values.any() for values in alone) and torch.equal(together, sum(alone))


def test_lost_file_fails_its_blocks(connect, cache, files, aligner, caplog):
    """A file that is lost while the engine runs fails its own request and no other."""
    body, worker = slots_request(files)["kv_transfer_params"]["slots"], connect(Role.WORKER)
    (other,) = cache.prefix_files(QUESTION, [ADA])
    beside = load_of(slots_request(other)["kv_transfer_params"]["slots"], 0, list(range(20, 30)))
    blocks = [7, 3, 11, 2, 34, 12, 13, 14, 15, 16, 17, 18]
    lost = load_of(body, BLOCK, blocks)
    files.paths[2].unlink()
    pages = load(worker, aligner[0], lost, beside)
    assert torch.equal(pages, load(connect(Role.WORKER), aligner[0], beside)) and pages.any()
    num_blocks = -(-sum(files.num_slots) // BLOCK)
    assert worker.get_block_ids_with_load_errors() == set(blocks[1:num_blocks])
    assert worker.get_block_ids_with_load_errors() == set() and files.paths[2].name in caplog.text


# Copying


def test_copying_equals_pytorch(processor):
    """The tokens that may be copied equal those of PyTorch after texts that follow or leave the passages."""
    documents, draws = [ADA, RADIK, "No. 7 is long-lived."], random.Random(0)
    texts = copied_texts(processor.tokenizer, documents, "not in the text")
    packed = json.loads(
        json.dumps(copy_field(processor_with(processor, no_answer="not in the text"), documents, 8.0, [2]))
    )
    assert packed["bonus"] == 8.0 and packed["end_ids"] == [2]
    ended = 0
    for _ in range(300):
        written = []
        for _ in range(12):
            expected = copied_next(texts, written, {2})
            assert slots.copied_next(packed["texts"], written, [2]) == expected
            ended += 2 in expected
            if not expected:
                break
            written.append(draws.choice(expected) if draws.random() < 0.97 else draws.randrange(300))
    assert ended > 50
    prefer = slots.SlotsLogitsProcessor().new_req_logits_processor(
        SimpleNamespace(extra_args={"kv_transfer_params": {"copy": packed}})
    )
    logits = prefer([], torch.zeros(400))
    assert logits.nonzero().flatten().tolist() == copied_next(texts, [], {2}) and set(logits.tolist()) == {0.0, 8.0}
