"""What damage puts in the place of a value."""

from __future__ import annotations

TEXTS = (
    *("", " ", "\0", "\n", "a\tb", '"', "'", ",", "\x1b[31mred\x1b[0m", "[red]", "[/]", "\u202eabc\u202c", "\u200b"),
    *("\ufeff", "caf\u00e9", "x" * 300, "y" * 70_000, "../../../x", "/etc/passwd", "/dev/zero", "~", "-1", "nan"),
    *("1e999", "null", "true", "{0..99999999999}.tar", "{a,b}" * 40 + ".tar", "*.tar", "pipe:ls", "http://host/x.tar"),
    *("${HOME", "${NO_SUCH}", "a::b", "data.tar::data.tar", "local-dir:.", "folder", "pairs.csv", "model.json", "."),
    *("ViT-B-33", "coca_x", "%s%n"),
)
NUMBERS = (0, -1, 1, 2, 3, 0.5, 7.5, 1e-9, 1e300, float("nan"), float("inf"), 10**9, 10**18, 10**30, -(10**9))
YAML_VALUES = (
    *("[" * 400, "{a: " * 400, "&a [*a]", "*missing", "!!python/object/apply:os.system ['touch PWNED']", "!!binary zz"),
    *("!!timestamp 2026-99-99", "2026-99-99", "0b", "0x", "1:30", "? x", "- x", "{}", "[]", "[1, [2]]", "|\n  a\n  b"),
    *("~", "'unclosed", '"\\ud800"', '"\\0"', "\t", "%", "@", "`", "!!set {a}", "<<: *a", "9" * 5000),
)
YAML_WORDS = (
    *("1", "2", "3", "3.0", "3.5", "1e3", "0.5", "1e-4", "0", "16", "24", "true", "false", "yes", "no", "null", "sym"),
    *("asym-t2i", "cosine", "dot", "learned", "multi", "fp32", "csv", "webdataset", "folder", "test", "[none=1]"),
)
_SETTINGS = r"""
lr 1 1e-9 1e30 | wd 0 1e9 | epochs 1.0 | seed 0 18446744073709551616 | eps 1 | warmup 0 0.99 1 2 | beta1 0 0.999
beta2 0 | gamma_lr 1e9 | proj_wd ~ 0 | norm cosine dot dnorm learned | loss asym-i2t asym-t2i | positives multi none
i2t_weight 0 1 0.3 | gamma_init 0.01 1e-300 | grad_clip_norm 1e-9 1e9 ~ | logit_scale_init 1e-9 99 50.5
logit_scale_max 1e-9 1e9 | train_num_samples 8 9 1 | accum_freq 2 3 4 | keep_last true | keep_checkpoints 1 100
max_bad_samples 0 | force_image_size 1 16 31 64 | force_context_length 1 2 20 | precision amp_bf16 | lock_image true
lock_text yes | cache_features true | grad_checkpointing true | val_data folder data.tar pairs.csv
aug_cfg [none=1] [scale=0.5] [color_jitter=-1] [re_prob=2] [re_count=inf] ["ratio=0,0"] []
val_split train ../folder/test | train_split test | train_data folder pairs.csv *.tar folder/train '{data,data}.tar'
dataset_type csv | csv_separator , '\t' ab | csv_img_key title | csv_caption_key filepath | val_steps 1
model ViT-B-33 local-dir:folder RN50.json | pretrained data.tar openai | image_trunk data.tar | text_trunk folder
pretrained_image true | compare [folder] [] | strict true | name x | resume latest data.tar | log_every_n_steps 7
device cuda:99 | workers 99999 | gamma_schedule switch anneal | gamma_from dot qnorm | gamma_start 0 0.9 1 9
gamma_end 0 0.9 1 | stage2_lr_factor 1e-9 0 | i2t_weight_end 0 1 2 | norm_drift 0.1 1e30 | focal 2 1e9
init_from folder . data.tar
"""
# name -> values that it may have, or nearly
SETTINGS = {s.split()[0]: tuple(s.split()[1:]) for line in _SETTINGS.strip().split("\n") for s in line.split("|")}
TAR_FIELDS = {  # name -> (offset, length)
    **{"name": (0, 100), "mode": (100, 8), "uid": (108, 8), "size": (124, 12), "mtime": (136, 12), "type": (156, 1)},
    **{"linkname": (157, 100), "magic": (257, 8), "uname": (265, 32), "prefix": (345, 155), "sparse": (386, 100)},
}
