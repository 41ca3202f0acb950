"""What is masked in a command line, and what is left as it is."""

import doctest
import json
import shlex

import pytest
from gpuwatch.core import secrets
from gpuwatch.core.secrets import MASK, is_secret_name, masked_command, masked_text, masked_variables
from hypothesis import given
from hypothesis import strategies as st

# ruff: noqa: SIM905  # a page of quoted names reads worse

SECRET = """
    --token --hf-token --hf_token --hftoken HF_TOKEN HUGGING_FACE_HUB_TOKEN GITHUB_TOKEN2 --access-token accessToken
    HFToken --auth-token model.token hub.auth_token --use-auth-token --session-token --key --api-key --api_key
    --apikey apiKey APIKey OPENAI_API_KEY wandb.api_key --private-key --ssh-key AWS_SECRET_ACCESS_KEY
    AWS_ACCESS_KEY_ID --api-keys --encryption-key --secret --client-secret clientSecret SECRET_KEY_BASE --password
    --db.password DB_PASSWORD_PROD dbpassword --passwd --pwd --user-pass PGPASSWORD --passphrase --credentials
    --db-creds Authorization --auth --slack-webhook token token1
""".split()
ORDINARY = """
    --tokenizer --tokenizer-name --max-tokens --max-token --num-tokens --token-ids --pad-token --pad_token_id
    --eos-token --eos_token eos_token_id --bos-token --mask-token --sep-token --cls-token --unk-token --image-token
    --tokens-per-batch --keyboard --keys --sort-key --public-key monkey turkey --num-key-value-heads
    --key-value-heads --n-key --hotkeys --key-file --token-file --secret-file --password-file SECRETS_DIR
    --secret-name --max-pass --forward-pass compass --passes --author --authors --lr --batch-size PWD OLDPWD
    secretary NCCL_IB_PKEY SSH_AUTH_SOCK --weight-decay --
""".split()


def test_the_examples_of_its_functions_are_right():
    assert doctest.testmod(secrets).failed == 0


def test_the_name_of_a_secret():
    assert [name for name in SECRET if not is_secret_name(name)] == []


def test_an_ordinary_name():
    assert [name for name in ORDINARY if is_secret_name(name)] == []


@pytest.mark.parametrize(
    ("line", "masked"),
    [
        ("train.py --token=hunter2 --lr 3", "train.py --token=*** --lr 3"),
        ("train.py --token hunter2 --lr 3", "train.py --token *** --lr 3"),
        ("train.py '--password=my hunter2' x", "train.py --password=*** x"),
        ("train.py -token hunter2", "train.py -token ***"),
        ("train.py --api-keys hunter2 swordfish --lr 3", "train.py --api-keys *** *** --lr 3"),
        ("train.py --private-key '-----BEGIN KEY-----\nhunter2'", "train.py --private-key ***"),
        ("train.py model.token=hunter2 +wandb.api_key=hunter2", "train.py model.token=*** +wandb.api_key=***"),
        ("docker run -e WANDB_API_KEY=hunter2 image", "docker run -e WANDB_API_KEY=*** image"),
        ("env --unset=A 'HF_TOKEN=a;b c' x", "env --unset=A HF_TOKEN=*** x"),
        ("ray submit '--env=HF_TOKEN=a b' x", "ray submit --env=HF_TOKEN=*** x"),
        ("srun --export=ALL,HF_TOKEN=hunter2,N=2 x", "srun --export=ALL,HF_TOKEN=***,N=2 x"),
        ("bash -c 'HF_TOKEN=hunter2 python x --lr 3'", "bash -c 'HF_TOKEN=*** python x --lr 3'"),
        ("bash -lc 'x --token hunter2 --lr 3; y'", "bash -lc 'x --token *** --lr 3; y'"),
        ("""bash -c 'x --key="a b" --secret  c && y'""", "bash -c 'x --key=*** --secret  *** && y'"),
        ("""sh -c "echo don't; x --token='a b' y" """, """sh -c "echo don't; x --token=*** y" """),
        ("""sh -c "curl 'https://host?token=hunter2' -o y" """, """sh -c "curl 'https://host?token=***' -o y" """),
        ("x --data https://me:hunter2@host:80/a", "x --data 'https://***@host:80/a'"),
        ("x --data https://hunter2@host/a", "x --data 'https://***@host/a'"),
        ("x s3://me:hunter2@host", "x 's3://***@host'"),
        ("x 'https://host/a?n=1&sig=hunter2&b=2'", "x 'https://host/a?n=1&sig=***&b=2'"),
        ("curl -H 'Authorization: Bearer hunter2' host", "curl -H 'Authorization: ***' host"),
        ("curl '--header=X-Api-Key: hunter2' host", "curl '--header=X-Api-Key: ***' host"),
        ("""x --config '{"api_key": "hunter2", "n": [1]}'""", """x --config '{"api_key": ***, "n": [1]}'"""),
        (r"""x --config '{\"token\": \"hunter2\", \"n\": 1}'""", r"""x --config '{\"token\": ***, \"n\": 1}'"""),
        ("x '+log={token:hunter2,name:a}'", "x '+log={token:***,name:a}'"),
    ],
)  # fmt: skip
def test_a_command_line(line, masked):
    assert masked_command(shlex.split(line)) == shlex.split(masked)


@pytest.mark.parametrize(
    "line",
    [
        "train.py --token --lr 3",
        "train.py --lr 3 --token",
        "train.py --token= x",
        "train.py --no-token x",
        "train.py --add-auth-token x",
        "x ssh://git@host/a",
        "x --sig=3 signature=4",
        "x -v /run/secrets:/run/secrets:ro tcp://my-token:29401",
        "x 'a note: with words' --tokenizer gpt2 --max-tokens 512",
    ],
)
def test_a_command_line_without_secrets(line):
    assert masked_command(shlex.split(line)) == shlex.split(line)


names = st.sampled_from([name for name in SECRET if name.startswith("--") and not name.endswith("s")])
values = st.text(min_size=1).map(lambda text: f"q7#{text}")
"""Each begins with what is in no other word."""


def forms_of(name: str, value: str) -> list[list[str]]:
    plain = name.lstrip("-")
    return [
        [f"{name}={value}"],
        [name, value],
        ["-e", f"{plain}={value}"],
        [f"+model.{plain}={value}"],
        [f"--env={plain}={value}"],
        [json.dumps({plain: value, "n": 1})],
        [f"""bash -c {shlex.quote(f"{plain}={shlex.quote(value)} train.py")}"""],
        ["bash", "-c", f"train.py {name} {shlex.quote(value)} --lr 1"],
    ]


@given(st.data(), names, values)
def test_no_value_survives(data, name, value):
    words = data.draw(st.sampled_from(forms_of(name, value)))
    masked = masked_command(["gpuwatch", "launch", *words, "--lr", "1"])

    assert "q7#" not in " ".join(masked)
    assert MASK in " ".join(masked)
    assert masked[:2] == ["gpuwatch", "launch"]
    assert masked[-2:] == ["--lr", "1"]
    assert len(masked) == len(words) + 4


@given(st.text(st.characters(exclude_characters="/", exclude_categories=["Z", "Cc", "Cs"]), min_size=1))
def test_no_password_of_an_address_survives(password):
    assert masked_command([f"--data=https://me:{password}@host"]) == [f"--data=https://{MASK}@host"]
    assert masked_text(f"at postgres://me:{password}@host/db") == f"at postgres://{MASK}@host/db"


@given(st.lists(st.one_of(st.sampled_from(ORDINARY), st.from_regex(r"[a-z]{1,5}(\.[a-z]{1,4})?", fullmatch=True).filter(
    lambda word: not is_secret_name(word)), st.integers().map(str))))  # fmt: skip
def test_what_names_no_secret_is_left_as_it_is(words):
    assert masked_command(words) == words
    assert masked_command([f"{word}=1" for word in words]) == [f"{word}=1" for word in words]


@given(st.lists(st.one_of(st.text(), st.sampled_from([*SECRET, *ORDINARY, *[f"{name}='a b" for name in SECRET]]))))
def test_masking_is_done_once(words):
    masked = masked_command(words)

    assert len(masked) == len(words)
    assert masked_command(masked) == masked


def test_variables():
    environ = {"HF_TOKEN": "hunter2", "NCCL_DEBUG": "INFO", "TORCH_PROXY": "http://me:hunter2@host", "API_KEY": ""}

    masked = {"HF_TOKEN": MASK, "NCCL_DEBUG": "INFO", "TORCH_PROXY": f"http://{MASK}@host", "API_KEY": ""}
    assert list(masked_variables(environ).items()) == list(masked.items())
